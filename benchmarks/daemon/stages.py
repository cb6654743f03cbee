"""`make profile`: the cost of each stage of the daemon, in rows a second and core; flame graphs.

A backlog of 1.5M changes is drained by a daemon whose stages are timed
(`benchmarks.daemon.staged`), once by SQL functions and once streamed. It is then drained by a plain
daemon under py-spy, which draws benchmarks/.data/flame-*.svg. If `perf` is available, it lists the
hot native functions. `--rows N` makes the backlog smaller.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.daemon import drain, staged
from benchmarks.harness.rig import Rig, rig
from ingestd.model.lsn import Lsn
from ingestd.testing.embedded.daemon import Daemon, module_environment

_FOLDER = Path(__file__).parents[1]
RESULTS = _FOLDER / "PROFILE.md"
FLAMES = _FOLDER / ".data"
RUNS = (drain.Run(), drain.Run(streaming=True))
FLAMED = tuple(drain.Run(streaming=run.streaming, tag="flame") for run in RUNS)
START, RECEIVE = "start", "receive and hand over"
ORDER = (START, RECEIVE, staged.DECODE, staged.CAST, staged.PARQUET, staged.COMMIT, staged.FSYNC)
ALL = "all"
HEAD = ("transport", "stage", "CPU s", "rows/s a core", "wall s")
_TEXT = """\
# Where the time goes

`make profile`: {changes:,} changes of ten columns drained over TCP by one daemon, {when}, with a
load average of {load}. The time of a stage is its functions' CPU time, in all threads, without the
stages inside it; the rest after the first message is `receive` (sockets, the event loop). The rate
is changes per CPU second: the stage with the lowest rate is the next bottleneck. fsync waits rather
than computes: see its wall time, which overlaps with other stages.

{table}"""


def main(rows: int) -> None:
    """Run the benchmark; print and write the table."""
    with rig() as server:
        daemons, target = drain.prepare(server, (*RUNS, *FLAMED), rows=rows)
        found = {run: _staged(server, run, daemons[run], target) for run in RUNS}
        for run in FLAMED:
            _flamed(server, run, daemons[run], target)
    changes = rows + rows // 2
    lines = list(_lines(found, changes))
    table = Table(*HEAD)
    for line in lines:
        table.add_row(*line)
    Console().print(table)
    text = _TEXT.format(
        changes=changes,
        when=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        load=f"{_load():.1f}",
        table=_markdown([HEAD, *lines]),
    )
    RESULTS.write_text(text, encoding="utf-8")
    print(f"written to {RESULTS.name}; flame graphs in {FLAMES.name}")


def _load() -> float:
    return float(Path("/proc/loadavg").read_text(encoding="utf-8").split()[0])


def _staged(server: Rig, run: drain.Run, daemon: Daemon, target: Lsn) -> dict[str, staged.Spent]:
    """Drain the backlog with a daemon that times its stages."""
    report = daemon.folder / "stages.json"
    command = ["-m", "benchmarks.daemon.staged", daemon.config_path.name, report.name]
    with _running(command, daemon) as process:
        server.await_confirmed(run.slot, target)
        process.terminate()
        process.wait(30)
    server.forget(run.name)
    told = json.loads(report.read_text(encoding="utf-8"))
    found = {name: staged.Spent(*seconds) for name, seconds in told.items()}
    whole = found.pop(ALL)
    rest_s = whole.cpu_s - sum(spent.cpu_s for spent in found.values())
    return {RECEIVE: staged.Spent(rest_s)} | found


def _flamed(server: Rig, run: drain.Run, daemon: Daemon, target: Lsn) -> None:
    """Drain the backlog with a plain daemon, sampled by py-spy and perf."""
    FLAMES.mkdir(exist_ok=True)
    name = _name(run)
    daemon.start()
    flame = FLAMES / f"flame-{name}.svg"
    spy = [str(Path(sys.executable).with_name("py-spy")), "record", "--threads", "--rate", "200"]
    looks = [[*spy, "--pid", str(daemon.pid), "--output", str(flame)]]
    if shutil.which("perf"):
        looks.append(["perf", "record", "-q", "-o", str(daemon.folder / "perf"), "-p"])
        looks[-1].append(str(daemon.pid))
    looking = [
        subprocess.Popen(look, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for look in looks
    ]
    server.await_confirmed(run.slot, target)
    daemon.sigterm()
    for one in looking:
        one.wait(60)
    server.forget(run.name)
    if len(looks) > 1 and looking[1].returncode == 0:
        report = ["perf", "report", "-i", str(daemon.folder / "perf"), "--stdio", "-q"]
        report += ["--sort", "dso,symbol", "--percent-limit", "1", "-g", "none"]
        told = subprocess.run(report, check=False, capture_output=True, text=True).stdout
        (FLAMES / f"perf-{name}.txt").write_text(told, encoding="utf-8")


@contextmanager
def _running(command: Sequence[str], daemon: Daemon) -> Iterator[subprocess.Popen[bytes]]:
    with daemon.log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=daemon.folder,
            env=module_environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _lines(
    found: Mapping[drain.Run, Mapping[str, staged.Spent]], changes: int
) -> Iterator[tuple[str, ...]]:
    for run, stages in found.items():
        whole = {ALL: staged.Spent(sum(one.cpu_s for one in stages.values()))}
        for stage in (*ORDER, ALL):
            spent = (whole | dict(stages)).get(stage, staged.Spent())
            rate = f"{changes / spent.cpu_s / 1e6:.2f}M" if spent.cpu_s else ""
            wall = f"{spent.wall_s:.2f}" if spent.wall_s else ""
            yield (_name(run), stage, f"{spent.cpu_s:.2f}", rate, wall)


def _name(run: drain.Run) -> str:
    return "streamed" if run.streaming else "drained"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rows = (f"| {' | '.join(line)} |\n" for line in lines)
    return "".join([head, f"|{'---|' * len(lines[0])}\n", *rows])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.daemon.stages")
    parser.add_argument("--rows", type=int, default=drain.ROWS)
    main(parser.parse_args().rows)

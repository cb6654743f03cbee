"""benchmarks/RESULTS.md: one line for each figure, with the time of its last measurement."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import deltalake
import psutil
import pyarrow as pa

from benchmarks.harness.figure import Figure

_FOLDER = Path(__file__).parents[1]
RESULTS = _FOLDER / "RESULTS.md"
PLOTS = _FOLDER / "plots"
_PICTURES = {
    "drain": "Changes durable while a backlog is drained",
    "memory": "Resident memory over time",
    "freshness": "Freshness",
}
_HEAD = """\
| what | measured | to reach | reached | when, load |
|---|---|---|---|---|
"""
_TEXT = """\
# Results

`make bench` measures the core (about ten minutes, the first lines). `make bench ARGS=NAME` measures
parts of it, or other benchmarks. `make bench-quick` measures a small core (under 90 s); its lines
begin with `quick`, and the start of the processes takes a large share of them. Ratios are speeds
against a reference in the same run on the same server; above 1 is faster. Times of the daemon begin
with the start of its process, except for the snapshot (from the state `snapshotting` to the durable
epoch).

Machine of the newest lines: {machine}; shared with
other work: the last column has the time (UTC) and the load average of one minute at the start. With
a load of 0 the spread is about 20 %. With a load above the number of cores, times and ratios mean
little.
PostgreSQL {major} (fsync on), Python {python}, pyarrow {pyarrow}, deltalake {deltalake}.

{table}{pictures}"""


def read_lines(text: str) -> dict[str, str]:
    """Return the lines of a results file by the name of their figure."""
    table = text.rpartition("|---|\n")[2]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def line_of(figure: Figure, when: str, kind: str = "") -> str:
    """Return a line of the table."""
    reached = "yes" if figure.is_reached else "no"
    return f"| {kind}{figure.what} | {figure.measured} | {figure.reach} | {reached} | {when} |"


def report(lines: dict[str, str], major: int) -> str:
    """Return the text of the results file; `major`: of the server."""
    return _TEXT.format(
        machine=_machine(),
        major=major,
        python=platform.python_version(),
        pyarrow=pa.__version__,
        deltalake=deltalake.__version__,
        table=_HEAD + "".join(f"{line}\n" for line in lines.values()),
        pictures="".join(
            f"\n![{what}](plots/{name}.png)\n"
            for name, what in _PICTURES.items()
            if (PLOTS / f"{name}.png").exists()
        ),
    )


def _machine() -> str:
    memory_gb = psutil.virtual_memory().total / 1e9
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    return f"{_cpu()}, {os.cpu_count()} cores, {memory_gb:.0f} GB, {system}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

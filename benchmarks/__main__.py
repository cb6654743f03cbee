"""`make bench`: run all benchmarks, print the table, write benchmarks/RESULTS.md."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import deltalake
import psutil
import pyarrow as pa

from benchmarks import (
    chunked,
    datasource,
    decode,
    drain,
    freshness,
    idle,
    many_tables,
    mirror,
    polling,
    reference,
    resume,
    snapshot,
    sweep,
)
from benchmarks.rig import Rig, rig

RESULTS = Path(__file__).with_name("RESULTS.md")
MEMORY_LIMIT_MB = 600


@dataclass(frozen=True, slots=True)
class Figure:
    """A line of the table: what was measured, and what it is to reach."""

    what: str
    measured: str
    reach: str
    is_reached: bool


def _drain(rig: Rig, *, socket: bool) -> list[Figure]:
    found = drain.measure(rig, socket=socket)
    kind = "unix socket" if socket else "TCP loopback"
    text = (
        f"{found['ratio']:.2f} ({found['daemon_s']:.1f} s, reference {found['reference_s']:.1f} s; "
        f"{found['changes_per_s'] / 1e3:.0f}k changes/s, {found['cpu_s']:.1f} CPU s)"
    )
    what = f"drain of 1.5M changes, {kind}: speed against pg_recvlogical"
    return [
        Figure(what, text, "0.8", found["ratio"] >= 0.8),
        _memory(f"peak memory, drain, {kind}", found["peak_mb"]),
    ]


def _snapshot(rig: Rig) -> list[Figure]:
    figures = []
    by_workers = snapshot.measure(rig)
    for workers, found in by_workers.items():
        text = (
            f"{found['ratio']:.2f} ({found['daemon_s']:.2f} s, reference "
            f"{found['reference_s']:.2f} s; {found['whole_s']:.2f} s from the start of the process)"
        )
        what = f"snapshot of 1M rows, workers: {workers}: speed against psql COPY"
        figures.append(Figure(what, text, "0.7", found["ratio"] >= 0.7))
    one, two = (by_workers[workers] for workers in snapshot.WORKERS)
    ratio = two["ratio"] / one["ratio"]
    what = "snapshot of 1M rows: speed of two workers against one"
    figures.append(Figure(what, f"{ratio:.2f}", "1 (spread 10 %)", ratio >= 0.9))
    larger = snapshot.measure_larger(rig)
    ratio = larger["peak_mb"] / two["peak_mb"]
    rate = snapshot.LARGER * snapshot.ROWS / larger["daemon_s"] / 1e6
    return [
        *figures,
        _memory("peak memory, snapshot of 1M rows", two["peak_mb"]),
        _memory("peak memory, snapshot of 10M rows", larger["peak_mb"]),
        Figure(
            "peak memory, snapshot of 10M rows against 1M",
            f"{ratio:.2f} ({rate:.2f}M rows/s)",
            "< 1.25",
            ratio < 1.25,
        ),
        Figure(
            "memory, snapshot of 10M rows: the last third of the time against the one before",
            f"{larger['growth']:.2f}",
            "< 1.1",
            larger["growth"] < 1.1,
        ),
    ]


def _many_tables(rig: Rig) -> list[Figure]:
    found = many_tables.measure(rig)
    text = f"{found['whole_s']:.1f} s ({found['epochs']:.0f} epochs, {found['cpu_s']:.1f} CPU s)"
    what = "300 tables of 100 rows: from the start of the process to the epoch with the last"
    return [
        Figure(what, text, "< 15 s", found["whole_s"] < 15),
        _memory("peak memory, 300 tables", found["peak_mb"]),
    ]


def _resume(rig: Rig) -> list[Figure]:
    found = resume.measure(rig)
    worst, mean, again = found["lost_max"], found["lost_mean"], found["again_mean"]
    killed = f"killed {resume.KILLS} times in a snapshot of 2M rows under writes"
    return [
        Figure(
            f"{killed}: read and not kept at a kill, in chunks a worker",
            f"{worst:.2f} at worst, {mean:.2f} on average ({found['rounds']:.0f} snapshots)",
            "1",
            worst <= 1.05,
        ),
        Figure(
            f"{killed}: read more than once, in chunks a worker and kill",
            f"{again:.2f} (a chunk has {found['chunk_rows']:.0f} rows)",
            "1",
            again <= 1.05,
        ),
        Figure(
            f"{killed}: rows that differ at the end",
            f"{found['wrong_rows']:.0f}",
            "0",
            found["wrong_rows"] == 0,
        ),
    ]


def _chunked(rig: Rig) -> list[Figure]:
    found = chunked.measure(rig)
    beside = f"{chunked.WRITES_PER_S} transactions/s beside snapshots of 2M rows in chunks"
    alone_mb, beside_mb = found["retained_alone_mb"], found["retained_beside_mb"]
    return [
        Figure(
            f"{beside}: freshness p99 against that without",
            f"{found['ratio']:.2f} ({found['p99_beside_s']:.2f} s, {found['p99_alone_s']:.2f} s; "
            f"{found['snapshots']:.0f} snapshots, {found['rows_per_s'] / 1e6:.2f}M rows/s, "
            f"{found['per_second']:.0f} transactions/s)",
            "1.5",
            found["ratio"] <= 1.5,
        ),
        Figure(
            f"{beside}: longest transaction of the daemon's",
            f"{found['longest_s']:.2f} s",
            "< 5 s",
            found["longest_s"] < 5,
        ),
        Figure(
            f"{beside}: WAL held back by the slot, at most",
            f"{beside_mb:.0f} MB ({alone_mb:.0f} MB without)",
            "flat",
            beside_mb < 2 * alone_mb + 16,
        ),
        _memory(f"peak memory, {beside}", found["peak_mb"]),
    ]


def _freshness(rig: Rig) -> list[Figure]:
    found = freshness.measure(rig)
    text = (
        f"p50 {found['p50_s']:.2f} s, p99 {found['p99_s']:.2f} s "
        f"({found['per_second']:.0f}/s, {found['core_share']:.1%} of a core)"
    )
    what = "freshness, 200 small transactions/s, max_delay 1s"
    return [
        Figure(what, text, "p99 < 1.3 s", found["p99_s"] < 1.3),
        _memory("peak memory, freshness", found["peak_mb"]),
    ]


def _idle(rig: Rig) -> list[Figure]:
    found = idle.measure(rig)
    what = "idle, 10 sources: share of a core"
    text = f"{found['core_share']:.2%}"
    return [
        Figure(what, text, "< 1 %", found["core_share"] < 0.01),
        _memory("memory, idle, 10 sources", found["peak_mb"]),
    ]


def _decode() -> list[Figure]:
    found = decode.measure()
    text = f"{found['rows_per_s'] / 1e6:.2f}M rows/s"
    mixed = decode.measure_mixed()["values_per_s"]
    odd = decode.measure_odd()
    worst = max(odd, key=odd.__getitem__)
    return [
        Figure("decode alone, one core", text, "1M rows/s", found["rows_per_s"] >= 1e6),
        Figure("decode, 60 columns", f"{mixed / 1e6:.1f}M values/s", "8M", mixed >= 8e6),
        Figure(
            "decode, 1 % odd values: time against a clean column",
            f"{odd[worst]:.2f} ({worst}, the worst)",
            "< 2",
            odd[worst] < 2,
        ),
    ]


def _datasource(rig: Rig) -> list[Figure]:
    return [
        Figure(
            f"Spark reads 1M rows in {partitions} partitions: speed against its JDBC source",
            f"{found['ratio']:.2f} ({found['ingestd_s']:.2f} s, JDBC {found['jdbc_s']:.2f} s)",
            "1 (aim 1.5)",
            found["ratio"] >= 1,
        )
        for partitions, found in datasource.measure(rig).items()
    ]


def _mirror(rig: Rig) -> list[Figure]:
    found = mirror.measure_one_table(rig.folder)
    mine, plain = found["mirror"], found["baseline"]
    many = mirror.measure_many_tables(rig.folder)
    update, tables = plain["many_s"] / mine["many_s"], many["baseline"] / many["mirror"]
    return [
        Figure(
            "first mirror of 1M rows, from the start of the process",
            f"{mine['load_s']:.1f} s (a plain job {plain['load_s']:.1f} s)",
            "< 25 s",
            mine["load_s"] < 25,
        ),
        Figure(
            "mirror, 500k updates of 1M rows: speed against a plain job",
            f"{update:.2f} ({mine['many_s']:.1f} s, {plain['many_s']:.1f} s)",
            "1.8",
            update >= 1.8,
        ),
        Figure(
            "mirror, 500k updates of 1M rows: rows that differ",
            f"{mine['wrong']:.0f} (a plain job {plain['wrong']:.0f}: values that were not sent)",
            "0",
            mine["wrong"] == 0,
        ),
        Figure(
            "mirror, 1k changes of 1M rows, warm",
            f"{mine['few_s']:.1f} s (a plain job {plain['few_s']:.1f} s)",
            "< 5 s",
            mine["few_s"] < 5,
        ),
        Figure(
            "mirror, 50 tables changed in one epoch: speed against 50 queries",
            f"{tables:.1f} ({many['mirror']:.1f} s, {many['baseline']:.1f} s)",
            "5",
            tables >= 5,
        ),
    ]


def _polling(rig: Rig) -> list[Figure]:
    load, steady = polling.measure_load(rig), polling.measure_steady(rig)
    return [
        Figure(
            "polling, first load of 1M rows: speed against kind wal",
            f"{load['ratio']:.2f} ({load['polling']:.2f} s, {load['wal']:.2f} s)",
            "0.8",
            load["ratio"] >= 0.8,
        ),
        Figure(
            "polling 10M rows, 1k changes between two polls: server time a poll",
            f"{steady['poll_ms']:.0f} ms (a pass through the table {steady['scan_ms']:.0f} ms)",
            "< 50 ms",
            steady["poll_ms"] < 50,
        ),
        _memory("peak memory, polling 10M rows", steady["peak_mb"]),
    ]


def _sweep(rig: Rig) -> list[Figure]:
    figures = []
    for kind, found in sweep.measure(rig).items():
        whole_s = found["load_s"] + found["sweep_s"]
        what = f"sweep of 10M {kind} keys"
        figures += [
            Figure(
                f"{what}, from nothing in memory to the {sweep.GONE} that are gone",
                f"{whole_s:.1f} s (of that what the lake holds {found['load_s']:.1f} s; "
                f"psql COPY of the keys {found['reference_s']:.1f} s)",
                "< 30 s",
                whole_s < 30 and found["found"] == sweep.GONE,
            ),
            Figure(
                f"peak memory, {what}",
                f"{found['peak_mb']:.0f} MB ({found['before_mb']:.0f} MB before)",
                "< 300 MB",
                found["peak_mb"] < 300,
            ),
        ]
    return figures


def _reference(rig: Rig) -> list[Figure]:
    found = reference.measure(rig)
    merge, plain = found["merge_s"], found["plain_s"]
    return [
        Figure(
            "reference table, 10k changes into 1M rows, with reading them from the lake",
            f"{merge:.2f} s (deltalake's merge alone {plain:.2f} s, {found['plain_mb']:.0f} MB)",
            "< 1.5 s",
            merge < 1.5,
        ),
        Figure(
            "peak memory, reference table, 10k changes into 1M rows",
            f"{found['merge_mb']:.0f} MB",
            "< 500 MB",
            found["merge_mb"] < 500,
        ),
        Figure(
            "reference table of 1M rows read anew: speed against psql COPY",
            f"{found['copy_s'] / found['read_s']:.2f} ({found['read_s']:.1f} s, "
            f"{found['copy_s']:.1f} s; {found['read_mb']:.0f} MB)",
            "0.3",
            found["copy_s"] / found["read_s"] >= 0.3,
        ),
        Figure(
            "reference table of 1M rows folded from the raw table",
            f"{found['fold_s']:.1f} s ({found['fold_mb']:.0f} MB)",
            "< 500 MB",
            found["fold_mb"] < 500,
        ),
    ]


def _memory(what: str, peak_mb: float) -> Figure:
    text = f"{peak_mb:.0f} MB"
    return Figure(what, text, f"< {MEMORY_LIMIT_MB} MB", peak_mb < MEMORY_LIMIT_MB)


STEPS: dict[str, Callable[[Rig], list[Figure]]] = {
    "decode": lambda _: _decode(),
    "snapshot": _snapshot,
    "tables": _many_tables,
    "resume": _resume,
    "chunked": _chunked,
    "drain": lambda rig: [*_drain(rig, socket=False), *_drain(rig, socket=True)],
    "freshness": _freshness,
    "idle": _idle,
    "datasource": _datasource,
    "mirror": _mirror,
    "reference": _reference,
    "polling": _polling,
    "sweep": _sweep,
}


def main(chosen: list[str]) -> int:
    """Run the benchmarks of these names, all if none; the others' results stay as they are."""
    unknown = set(chosen) - set(STEPS)
    if unknown:
        print(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
        return 2
    lines = _earlier() if chosen else {}
    is_reached = True
    with rig() as server:
        for name in chosen or STEPS:
            when = f"{datetime.now(UTC):%Y-%m-%d %H:%M}, {os.getloadavg()[0]:.1f}"
            print(f"{name} ...", flush=True)
            for figure in STEPS[name](server):
                print(f"  {figure.what}: {figure.measured}", flush=True)
                lines[figure.what] = _line(figure, when)
                is_reached = is_reached and figure.is_reached
            RESULTS.write_text(_report(lines, server.server.major), encoding="utf-8")
    print(f"written to {RESULTS.name}")
    return 0 if is_reached else 1


def _line(figure: Figure, when: str) -> str:
    reached = "yes" if figure.is_reached else "no"
    return f"| {figure.what} | {figure.measured} | {figure.reach} | {reached} | {when} |"


def _earlier() -> dict[str, str]:
    """Give the lines of the results file by what they measure."""
    if not RESULTS.exists():
        return {}
    text = RESULTS.read_text(encoding="utf-8").rpartition("|---|\n")[2]
    return {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line}


def _report(lines: dict[str, str], major: int) -> str:
    rows = "\n".join(lines.values())
    memory_gb = psutil.virtual_memory().total / 1e9
    return f"""\
# Results

`make bench`. Ratios are speeds against a reference in the same run on the same server and kind of
socket; above 1 is faster. Times of the daemon begin with the start of its process, but for the
snapshot (from the state `snapshotting` to the durable epoch).

Machine: {_cpu()}, {os.cpu_count()} cores, {memory_gb:.0f} GB, {platform.system()} \
{platform.release().split("-")[0]}; shared with other work: the last column has the time (UTC) and
how many processes wanted a core when it began (the load average of a minute). With a load of 0 the
spread is some 20 %; above the number of cores, times and ratios say little.
PostgreSQL {major} (fsync on), Python {platform.python_version()}, pyarrow {pa.__version__}, \
deltalake {deltalake.__version__}.

| what | measured | to reach | reached | when, load |
|---|---|---|---|---|
{rows}
"""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The core: figures with targets for the daemon, each against a reference in the same run."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import plots
from benchmarks.daemon import decode, drain, freshness, idle, snapshot
from benchmarks.harness.figure import Figure, memory_figure
from benchmarks.harness.rig import Rig
from ingestd.decode import native


@dataclass(frozen=True, slots=True)
class Size:
    """The amount of work; `prefix`: begins the names of its plots."""

    prefix: str
    drain_rows: int
    drain_rounds: int
    snapshot_runs: int
    freshness_seconds: int
    decode_transactions: int


FULL = Size("", drain.ROWS, 3, snapshot.RUNS, freshness.SECONDS, decode.TRANSACTIONS)
QUICK = Size("quick-", 300_000, 1, 1, 8, 30)


def decode_figures(_: Rig, size: Size) -> list[Figure]:
    """Return the figures of `decode`: 1.5M rows of ten columns; wide and odd ones."""
    rate = decode.rows_per_s_as_daemon(size.decode_transactions)
    measured = f"{rate / 1e6:.2f}M rows/s"
    if native.compiled is None:
        measured += " (without the compiled part)"
    elif size is not QUICK:
        without = decode.rows_per_s_as_daemon(size.decode_transactions, "numpy")
        measured += f" ({without / 1e6:.2f}M without the compiled part)"
    core = Figure("decode and cast, one core", measured, "1.5M rows/s", rate >= 1.5e6)
    if size is QUICK:
        return [core]
    mixed = decode.measure_mixed()["values_per_s"]
    odd = decode.measure_odd()
    worst = max(odd, key=odd.__getitem__)
    return [
        core,
        Figure("decode, 60 columns", f"{mixed / 1e6:.1f}M values/s", "8M", mixed >= 8e6),
        Figure(
            "decode, 1 % odd values: time against a clean column",
            f"{odd[worst]:.2f} ({worst}, the worst)",
            "< 2",
            odd[worst] < 2,
        ),
    ]


def drain_figures(rig: Rig, size: Size) -> list[Figure]:
    """Return the figures of `drain`: catch-up on TCP against both kinds of socket; streaming."""
    found = drain.measure(rig, rows=size.drain_rows, rounds=size.drain_rounds)
    plots.drain(rig, found, size.prefix)
    what = f"drain of {found.changes / 1e6:g}M changes"
    drained, tcp, unix = (
        found.drained[run] for run in (drain.CATCH_UP, drain.STREAM, drain.STREAM_UNIX)
    )
    return [
        _speed(f"{what}, TCP, against pg_recvlogical on a unix socket", drained, found.unix_s, 1.4),
        _speed(f"{what}, TCP, against pg_recvlogical on TCP", drained, found.tcp_s, 2.4),
        _speed(f"{what}, streaming only, TCP both", tcp, found.tcp_s, 0.95),
        _speed(f"{what}, streaming only, unix socket both", unix, found.unix_s, 0.95),
        Figure(f"{what}, CPU", f"{drained.cpu_s:.1f} s", "<= 5 s", drained.cpu_s <= 5),
        memory_figure(f"{what}, peak memory", drained.peak_mb, 512),
        memory_figure(f"{what}, streaming only, peak memory", max(tcp.peak_mb, unix.peak_mb), 512),
    ]


def _speed(what: str, found: drain.Drained, reference_s: float, least: float) -> Figure:
    ratio = reference_s / found.daemon_s
    text = (
        f"{ratio:.2f} ({found.daemon_s:.1f} s, reference {reference_s:.1f} s; "
        f"{found.cpu_s:.1f} CPU s)"
    )
    return Figure(what, text, f"{least:g}", ratio >= least)


def growth_figures(rig: Rig, _: Size) -> list[Figure]:
    """Return the figures of `growth`: ten times the changes."""
    runs, times = (drain.CATCH_UP,), 10
    little = drain.measure(rig, runs, rounds=3, has_references=False)
    little_run = little.drained[drain.CATCH_UP]
    much_run = drain.measure(rig, runs, rows=times * drain.ROWS, has_references=False).drained[
        drain.CATCH_UP
    ]
    ratio = much_run.daemon_s / little_run.daemon_s
    memory = much_run.peak_mb / little_run.peak_mb
    what = f"drain of {times * little.changes / 1e6:g}M changes against {little.changes / 1e6:g}M"
    return [
        Figure(
            f"{what}: time",
            f"{ratio:.1f} ({much_run.daemon_s:.1f} s, {little_run.daemon_s:.1f} s)",
            "<= 11",
            ratio <= 1.1 * times,
        ),
        Figure(
            f"{what}: peak memory",
            f"{memory:.2f} ({much_run.peak_mb:.0f} MB, {little_run.peak_mb:.0f} MB)",
            "<= 1.1",
            memory <= 1.1,
        ),
    ]


def snapshot_figures(rig: Rig, size: Size) -> list[Figure]:
    """Return the figures of `snapshot`: with one worker, with two, and of ten times the rows."""
    is_quick = size is QUICK
    workers = snapshot.WORKERS[-1:] if is_quick else snapshot.WORKERS
    by_workers = snapshot.measure(rig, size.snapshot_runs, workers)
    figures = []
    for number, found in by_workers.items():
        least = 0.9 if number == max(workers) else 0.7
        text = (
            f"{found['ratio']:.2f} ({found['daemon_s']:.2f} s, reference "
            f"{found['reference_s']:.2f} s; {found['whole_s']:.2f} s from the start of the process)"
        )
        what = f"snapshot of 1M rows, workers: {number}: speed against psql COPY"
        figures.append(Figure(what, text, f"{least:g}", found["ratio"] >= least))
    peak_mb = by_workers[max(workers)]["peak_mb"]
    figures.append(memory_figure("peak memory, snapshot of 1M rows", peak_mb, 512))
    if is_quick:
        return figures
    ratio = by_workers[2]["ratio"] / by_workers[1]["ratio"]
    what = "snapshot of 1M rows: speed of two workers against one"
    figures.append(Figure(what, f"{ratio:.2f}", "1 (spread 10 %)", ratio >= 0.9))
    larger = snapshot.measure_larger(rig)
    ratio = larger["peak_mb"] / peak_mb
    rate = snapshot.LARGER * snapshot.ROWS / larger["daemon_s"] / 1e6
    return [
        *figures,
        memory_figure("peak memory, snapshot of 10M rows", larger["peak_mb"], 512),
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


def freshness_figures(rig: Rig, size: Size) -> list[Figure]:
    """Return the figures of `freshness`: with a short delay and a long one."""
    short = freshness.measure(rig, max_delay="200ms", seconds=size.freshness_seconds)
    found = {"200ms": short}
    what = f"freshness, {freshness.RATE:,} small transactions/s, max_delay"
    p50, p99 = short.quantile_s(0.5), short.quantile_s(0.99)
    figures = [
        Figure(f"{what} 200 ms, p50", f"{p50 * 1e3:.0f} ms", "<= 200 ms", p50 <= 0.2),
        Figure(f"{what} 200 ms, p99", _p99(short), "<= 350 ms", p99 <= 0.35),
    ]
    if size is not QUICK:
        found["1s"] = long = freshness.measure(rig, max_delay="1s")
        is_reached = long.quantile_s(0.99) <= 1.15
        figures.append(Figure(f"{what} 1 s, p99", _p99(long), "<= 1,150 ms", is_reached))
    plots.freshness(found, size.prefix)
    plots.memory(rig, size.prefix)
    peak_mb = max(one.peak_mb for one in found.values())
    return [*figures, memory_figure("peak memory, steady (freshness)", peak_mb, 350)]


def _p99(found: freshness.Freshness) -> str:
    return (
        f"{found.quantile_s(0.99) * 1e3:.0f} ms ({found.per_second:.0f}/s, "
        f"{found.core_share:.1%} of a core)"
    )


def idle_figures(rig: Rig, _: Size) -> list[Figure]:
    """Return the figures of `idle`."""
    figures = []
    for sources in idle.SOURCES:
        found = idle.measure(rig, sources)
        what = "idle" if sources == 1 else f"idle, {sources} sources"
        text, is_reached = f"{found['core_share']:.2%}", found["core_share"] < 0.005
        figures.append(Figure(f"{what}: share of a core", text, "< 0.5 %", is_reached))
        figures.append(memory_figure(f"memory, {what}", found["peak_mb"], 350))
    return figures

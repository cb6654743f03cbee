"""Benchmarks outside the core: other sizes, kills, polling, reference tables, Spark."""

from __future__ import annotations

from benchmarks.daemon import (
    chunked,
    long_life,
    many_tables,
    object_store,
    polling,
    recovery,
    reference,
    resume,
    sweep,
    verify,
)
from benchmarks.harness.figure import Figure, memory_figure
from benchmarks.harness.rig import Rig
from benchmarks.spark import datasource, mirror, reading


def many_tables_figures(rig: Rig) -> list[Figure]:
    """Return the figures of `many_tables`."""
    found = many_tables.measure(rig)
    text = f"{found['whole_s']:.1f} s ({found['epochs']:.0f} epochs, {found['cpu_s']:.1f} CPU s)"
    what = "300 tables of 100 rows: from the start of the process to the epoch with the last"
    return [
        Figure(what, text, "< 15 s", found["whole_s"] < 15),
        memory_figure("peak memory, 300 tables", found["peak_mb"]),
    ]


def changing_tables_figures(rig: Rig) -> list[Figure]:
    """Return the figures of tables that change continuously."""
    few, many = (many_tables.changing(rig, count) for count in (50, 500))
    wide = many_tables.changing(rig, 150, columns=40)
    per_table = [found["commit_s"] / found["tables"] * 1000 for found in (few, many)]
    return [
        Figure(
            "500 tables that change all the time: commit of an epoch, a table (50 tables: a table)",
            f"{per_table[1]:.1f} ms ({per_table[0]:.1f} ms), {many['commit_s']:.1f} s together",
            "<= 1.5x that of 50",
            per_table[1] <= 1.5 * per_table[0],
        ),
        Figure(
            "500 tables that change all the time: epochs, transactions of the largest",
            f"{many['epochs']:.0f}, {many['transactions']:.0f}; {many['cpu_ms']:.1f} CPU ms each",
            "-",
            True,  # noqa: FBT003 - no target
        ),
        memory_figure("peak memory, 500 tables that change", many["peak_mb"]),
        Figure(
            "150 tables of 40 columns that change all the time: CPU of an epoch, a table",
            f"{wide['cpu_ms']:.1f} ms; commit {wide['commit_s']:.1f} s together",
            "-",
            True,  # noqa: FBT003 - no target
        ),
    ]


def life_figures(rig: Rig) -> list[Figure]:
    """Return the figures of `long_life`."""
    found = long_life.measure_commits(rig)
    what = f"{found.epochs} epochs on one table, the last against epoch 200"
    cpu, memory = found.late_cpu_ms / found.early_cpu_ms, found.late_mb / found.early_mb
    return [
        Figure(
            f"{what}: CPU of a commit",
            f"{cpu:.2f} ({found.late_cpu_ms:.1f} ms; wall {found.late_ms:.1f} ms, then"
            f" {found.early_ms:.1f} ms)",
            "<= 1.2",
            cpu <= 1.2,
        ),
        Figure(
            f"{what}: resident memory",
            f"{memory:.2f} ({found.late_mb:.0f} MB)",
            "<= 1.2",
            memory <= 1.2,
        ),
    ]


def recovery_figures(rig: Rig) -> list[Figure]:
    """Return the figures of `recovery`."""
    found = recovery.measure(rig)
    middle, most = found["median_s"], found["most_s"]
    what = f"{recovery.TABLES} tables, SIGKILL: from the start of the process to /readyz"
    return [
        Figure(
            what,
            f"{middle:.2f} s (max {most:.2f} s; {found['cpu_s']:.2f} CPU s)",
            "<= 3 s",
            middle <= 3.0,
        )
    ]


def resume_figures(rig: Rig) -> list[Figure]:
    """Return the figures of `resume`."""
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


def chunked_figures(rig: Rig) -> list[Figure]:
    """Return the figures of `chunked`."""
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
        memory_figure(f"peak memory, {beside}", found["peak_mb"]),
    ]


def datasource_figures(rig: Rig) -> list[Figure]:
    """Return the figures of `datasource`."""
    return [
        Figure(
            f"Spark reads 1M rows in {partitions} partitions: speed against its JDBC source",
            f"{found['ratio']:.2f} ({found['ingestd_s']:.2f} s, JDBC {found['jdbc_s']:.2f} s)",
            "1 (aim 1.5)",
            found["ratio"] >= 1,
        )
        for partitions, found in datasource.measure(rig).items()
    ]


def mirror_figures(rig: Rig) -> list[Figure]:
    """Return the figures of `mirror`."""
    found = mirror.measure_one_table(rig.folder)
    mine, public, plain = (found[name] for name in mirror.SIDES)
    many = mirror.measure_many_tables(rig.folder)
    update, tables = plain["many_s"] / mine["many_s"], many["baseline"] / many["mirror"]
    public_update, gain = plain["many_s"] / public["many_s"], public["few_s"] / mine["few_s"]
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
            "mirror, 1k changes of 1M rows, warm: speed with the accelerator against without",
            f"{gain:.2f} ({mine['few_s']:.1f} s, {public['few_s']:.1f} s; CPU"
            f" {mine['few_cpu_s']:.1f} s, {public['few_cpu_s']:.1f} s)",
            "1.5",
            gain >= 1.5,
        ),
        Figure(
            "mirror without the accelerator, 1k changes of 1M rows, warm",
            f"{public['few_s']:.1f} s (a plain job {plain['few_s']:.1f} s)",
            "< 3 s",
            public["few_s"] < 3,
        ),
        Figure(
            "mirror without the accelerator, 500k updates of 1M rows: speed against a plain job",
            f"{public_update:.2f} ({public['many_s']:.1f} s, {plain['many_s']:.1f} s;"
            f" {public['wrong']:.0f} rows differ)",
            "1.5",
            public_update >= 1.5 and public["wrong"] == 0,
        ),
        Figure(
            "mirror, 50 tables changed in one epoch: speed against 50 queries",
            f"{tables:.1f} ({many['mirror']:.1f} s, {many['baseline']:.1f} s)",
            "5",
            tables >= 5,
        ),
    ]


def reading_figures(rig: Rig) -> list[Figure]:
    """Return the figures of `reading`."""
    found = reading.measure(rig)
    ratio = found["mirror_s"] / found["all_s"]
    wrong = sum(found[f"{which}_wrong"] for which in ("all", "one", "forward"))
    return [
        Figure(
            "open_lake, current rows of 5M, 20 % changed: speed against the mirror's first load",
            f"{ratio:.1f} ({found['all_s']:.1f} s, {found['mirror_s']:.1f} s)",
            "3",
            ratio >= 3,
        ),
        Figure(
            "open_lake, current rows of 5M, 20 % changed: peak memory, wrong rows",
            f"{found['all_peak_mb']:.0f} MB, {wrong:.0f}",
            "< 1,000 MB, 0",
            found["all_peak_mb"] < 1000 and not wrong,
        ),
        Figure(
            "open_lake with a cache, all of 5M rows after 1k changes: speed against without",
            f"{found['all_s'] / found['forward_s']:.1f} ({found['forward_s']:.1f} s)",
            "3",
            found["all_s"] / found["forward_s"] >= 3,
        ),
    ]


def polling_figures(rig: Rig) -> list[Figure]:
    """Return the figures of `polling`."""
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
        memory_figure("peak memory, polling 10M rows", steady["peak_mb"]),
    ]


def sweep_figures(rig: Rig) -> list[Figure]:
    """Return the figures of `sweep`."""
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


def reference_figures(rig: Rig) -> list[Figure]:
    """Return the figures of `reference`."""
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


def verify_figures(rig: Rig) -> list[Figure]:
    """Return the figures of `verify`."""
    found = verify.measure(rig)
    what = "verify of 1M rows of 10 columns, 100k of them updated"
    return [
        Figure(
            f"{what}: from the start of the process",
            f"{found['s']:.1f} s (psql COPY {found['copy_s']:.1f} s)",
            "< 15 s",
            found["s"] < 15,
        ),
        Figure(
            f"peak memory, {what}, --memory {verify.SMALL_MEMORY}",
            f"{found['small_mb']:.0f} MB, {found['small_s']:.1f} s "
            f"({found['mb']:.0f} MB with --memory 512MB)",
            "< 400 MB",
            found["small_mb"] < 400,
        ),
    ]


def object_store_figures(rig: Rig) -> list[Figure]:
    """Return the figures of `object_store`."""
    found = object_store.measure(rig)
    slow_s = object_store.LATENCY_S
    at_once, slow = found.per_s[0.0], found.per_s[slow_s]
    ratio = slow / at_once
    text = (
        f"{ratio:.2f} ({slow / 1e3:.0f}k changes/s, {at_once / 1e3:.0f}k; commits of "
        f"{found.commit_s[slow_s]:.2f} s, {found.commit_s[0.0]:.2f} s; "
        f"{found.requests:.0f} requests an epoch)"
    )
    what = "drain to an S3 store, 30 ms added to each request: throughput against none"
    return [Figure(what, text, "0.95", ratio >= 0.95)]


def long_life_figures(rig: Rig) -> list[Figure]:
    """Return the figures of `long_life`."""
    found = long_life.measure(rig)
    what = f"{found.epochs:,} epochs on one table"
    commits, memory = found.late_ms / found.early_ms, found.late_mb / found.early_mb
    delay_ms = found.beside_p95_ms - found.alone_p95_ms
    return [
        Figure(
            f"{what}: time of a commit at the end against epoch 200",
            f"{commits:.2f} ({found.late_ms:.0f} ms, {found.early_ms:.0f} ms)",
            "<= 1.2",
            commits <= 1.2,
        ),
        Figure(
            f"{what}: memory at the end against epoch 200",
            f"{memory:.2f} ({found.late_mb:.0f} MB, {found.early_mb:.0f} MB)",
            "<= 1.2",
            memory <= 1.2,
        ),
        Figure(
            f"{what}: p95 of a commit beside maintenance, more than alone",
            f"{delay_ms:.0f} ms ({found.beside_p95_ms:.0f} ms, {found.alone_p95_ms:.0f} ms; "
            f"{found.looks} times, {found.joined:,} files joined)",
            "<= 50 ms",
            delay_ms <= 50,
        ),
    ]

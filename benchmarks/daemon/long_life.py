"""Many epochs on one table: commit time and memory at the end, compared with early epochs.

Maintenance runs with its defaults: whenever a table has a thousand new files.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pyarrow as pa

from benchmarks.harness.rig import Rig, config, source
from benchmarks.harness.writers import Writers
from ingestd.config import DEFAULT_TARGET_BYTES
from ingestd.demo.lake_view import view_lake
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.maintenance.compaction import MaintenancePolicy
from ingestd.lake.maintenance.process import MaintenanceProcess
from ingestd.model.changes import EpochSummary, TableBatch, change_schema
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Column, Table, TableId, with_before
from ingestd.pipeline.maintenance import MANY
from ingestd.process.memory import configure_allocators
from ingestd.testing.embedded.waiting import await_until

EPOCHS = 10_000
EARLY = range(100, 300)
"""Epochs around number 200."""
MAX_DELAY = "20ms"
RATE = 200
LIMIT_S = 3600.0
NAME = "long"
DEFAULT_RETENTION_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Life:
    """Commits in milliseconds and resident memory in MB, early and at the end.

    `beside_ms`: median of commits during maintenance (p95 in `beside_p95_ms`); `alone_ms`: that of
    the others; `looks`: number of maintenance runs; `joined`: files that these joined.
    """

    epochs: int
    early_ms: float
    late_ms: float
    early_mb: float
    late_mb: float
    alone_ms: float
    alone_p95_ms: float
    beside_ms: float
    beside_p95_ms: float
    looks: int
    joined: int
    log_files: int


def measure(rig: Rig, *, epochs: int = EPOCHS) -> Life:
    """Run a daemon for this many epochs of a few rows."""
    rig.psql("DROP TABLE IF EXISTS long_life")
    rig.psql("CREATE TABLE long_life (id bigserial PRIMARY KEY, at timestamptz, note text)")
    # By default the server sends asynchronous commits only every 200 ms.
    rig.psql("ALTER SYSTEM SET wal_writer_delay = '10ms'")
    rig.psql("SELECT pg_catalog.pg_reload_conf()")
    text = source(NAME, rig.server.dsn(), "public.long_life")
    daemon = rig.daemon(NAME, config(text, max_delay=MAX_DELAY))
    daemon.start_ready()
    meter = rig.meter(daemon)
    with Writers(rig, _write, RATE, sessions=2):
        await_until(
            lambda: len(daemon.events("epoch.committed")) >= epochs,
            LIMIT_S,
            f"{epochs} epochs",
            poll_s=2.0,
        )
    rig.await_confirmed(f"ingestd_{NAME}", rig.lsn())
    meter.stop()
    daemon.sigterm()
    rig.forget(NAME)
    rig.psql("ALTER SYSTEM RESET wal_writer_delay")
    rig.psql("SELECT pg_catalog.pg_reload_conf()")
    committed = daemon.events("epoch.committed")
    looks = daemon.events("maintenance.done")
    with rig.server.connect() as connection:
        [rows] = connection.execute("SELECT count(*) FROM long_life").fetchone() or (0,)
    held = view_lake(str(daemon.folder / "lake"), NAME).rows
    if held != {"public.long_life": rows + 1}:  # with the `t` of the snapshot
        msg = f"{rows} rows at the source, in the lake {held}"
        raise RuntimeError(msg)
    late = range(len(committed) - len(EARLY), len(committed))
    busy = [(_at_s(e) - float(e["seconds"]), _at_s(e)) for e in looks]
    beside = [_ms(e) for e in committed if any(b <= _at_s(e) <= a + 0.1 for b, a in busy)]
    alone = [_ms(e) for e in committed if not any(b <= _at_s(e) <= a + 0.1 for b, a in busy)]
    resident = list(zip(meter.at_s, meter.resident_bytes, strict=True))

    def memory_mb(numbers: range) -> float:
        first, last = (_at_s(committed[n]) - meter.began for n in (numbers[0], numbers[-1]))
        found = [nbytes for at, nbytes in resident if first <= at <= last]
        return statistics.median(found) / 1e6

    return Life(
        epochs=len(committed),
        early_ms=statistics.median(_ms(committed[n]) for n in EARLY),
        late_ms=statistics.median(_ms(committed[n]) for n in late),
        early_mb=memory_mb(EARLY),
        late_mb=memory_mb(late),
        alone_ms=_quantile(alone, 0.5),
        alone_p95_ms=_quantile(alone, 0.95),
        beside_ms=_quantile(beside, 0.5),
        beside_p95_ms=_quantile(beside, 0.95),
        looks=len(looks),
        joined=sum(int(e["joined_files"]) for e in looks),
        log_files=len(
            list((daemon.folder / "lake" / NAME / "public/long_life/_delta_log").iterdir())
        ),
    )


@dataclass(frozen=True, slots=True)
class Commits:
    """Figures of the sink alone: median commits early and at the end, in wall and CPU ms."""

    epochs: int
    early_ms: float
    late_ms: float
    early_cpu_ms: float
    late_cpu_ms: float
    early_mb: float
    late_mb: float
    looks: int


async def commits(folder: Path, *, epochs: int = EPOCHS, maintains: bool = True) -> Commits:
    """Commit epochs of one row, one after another, with concurrent maintenance.

    Maintenance runs when the table has as many new files as a `Maintainer` waits for.
    """
    column = Column("id", 20, -1, pa.int64(), "bigint", identity=True, nullable=False)
    table = with_before(Table(TableId("public", "t"), 1, (column,), "d", ("id",)), full=False)
    lake = DeltaLake(str(folder), NAME)
    await lake.open()
    await lake.adopt("server")
    process = MaintenanceProcess(
        str(folder), NAME, MaintenancePolicy(DEFAULT_TARGET_BYTES, DEFAULT_RETENTION_S)
    )

    async def maintain() -> None:
        async for told in process.run(joins=True, cleans=False):
            if told.error is not None:
                raise told.error

    wall, cpu, resident = [], [], []
    looks: list[asyncio.Task[None]] = []
    own = psutil.Process()
    for number in range(1, epochs + 1):
        writer = lake.begin_epoch()
        await writer.append_batch(_one_row(table, number))
        began, began_cpu = time.perf_counter(), time.process_time()
        at = Lsn(100 * number)
        await writer.commit(EpochSummary(at, Lsn(at + 5), datetime.now(UTC), 1, 1))
        wall.append((time.perf_counter() - began) * 1000)
        cpu.append((time.process_time() - began_cpu) * 1000)
        resident.append(own.memory_info().rss / 1e6)
        if maintains and number % MANY == 0:
            looks.append(asyncio.create_task(maintain()))
    await asyncio.gather(*looks)
    await lake.close()
    late = slice(-len(EARLY), None)
    early = slice(EARLY.start, EARLY.stop)
    return Commits(
        epochs=epochs,
        early_ms=statistics.median(wall[early]),
        late_ms=statistics.median(wall[late]),
        early_cpu_ms=statistics.median(cpu[early]),
        late_cpu_ms=statistics.median(cpu[late]),
        early_mb=statistics.median(resident[early]),
        late_mb=statistics.median(resident[late]),
        looks=len(looks),
    )


def measure_commits(rig: Rig, *, epochs: int = EPOCHS) -> Commits:
    """Run `commits` in a separate process, configured like a daemon, to measure its memory."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.daemon.long_life",
            str(rig.folder / "commits"),
            str(epochs),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return Commits(**json.loads(done.stdout))


def _main(folder: str, epochs: str) -> None:
    configure_allocators()
    print(json.dumps(asdict(asyncio.run(commits(Path(folder), epochs=int(epochs))))))


def _one_row(table: Table, number: int) -> TableBatch:
    values = {
        "id": number,
        "_cdc_op": "c",
        "_cdc_lsn": 100 * number,
        "_cdc_seq": 1,
        "_cdc_xid": number,
        "_cdc_ts": datetime.now(UTC),
    }
    return TableBatch(table, pa.RecordBatch.from_pylist([values], change_schema(table)), 100)


def _write(connection: psycopg.Connection[tuple[Any, ...]], _: random.Random) -> None:
    connection.execute("INSERT INTO long_life (at, note) VALUES (now(), 'a short note')")


def _at_s(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def _ms(event: dict[str, Any]) -> float:
    return float(event["seconds"]) * 1000


def _quantile(values: Sequence[float], share: float) -> float:
    own = sorted(values)
    return own[min(len(own) - 1, int(share * len(own)))] if own else 0.0


if __name__ == "__main__":
    _main(*sys.argv[1:])

"""A sweep of 10M keys against psql's COPY; quicker with 1M: `python -m benchmarks.daemon.sweep`.

The sweep runs alone in a separate process: it loads the lake's keys, reads the source's keys, and
looks up the missing ones in both.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from benchmarks.harness.rig import Rig, rig, timed
from ingestd.lake.delta_lake import DeltaLake
from ingestd.model.changes import EpochSummary, TableBatch, change_schema
from ingestd.model.lsn import Lsn
from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.model.schema import Column, Table, TableId
from ingestd.postgres.connection.session import connect
from ingestd.postgres.polling.keys.delete_sweep import Sweep, absent
from ingestd.postgres.polling.keys.key_pages import KeyPages
from ingestd.postgres.polling.keys.key_set import KeySet
from ingestd.postgres.settings import PollingSettings

ROWS, QUICK_ROWS = 10_000_000, 1_000_000
GONE = 1000
KINDS = {
    "bigint": (Column("id", 20, -1, pa.int64(), "bigint", identity=True, nullable=False), "i"),
    "uuid": (
        Column("id", 2950, -1, pa.string(), "uuid", identity=True, nullable=False),
        "md5(i::text)::uuid",
    ),
}
_AT = datetime(2026, 1, 1, tzinfo=UTC)


def measure(rig: Rig, rows: int = ROWS) -> dict[str, dict[str, float]]:
    """Return for each kind of key `load_s`, `sweep_s`, `reference_s`, `peak_mb`, `found`."""
    return {kind: _measure(rig, kind, rows) for kind in KINDS}


def _measure(rig: Rig, kind: str, rows: int) -> dict[str, float]:
    column, value = KINDS[kind]
    rig.psql("DROP TABLE IF EXISTS swept")
    rig.psql(f"CREATE UNLOGGED TABLE swept (id {column.pg_type} NOT NULL)")
    rig.psql(f"INSERT INTO swept SELECT {value} FROM generate_series(1, {rows}) i")
    rig.psql("ALTER TABLE swept ADD PRIMARY KEY (id)")
    lake = rig.folder / f"swept_{kind}_{rows}"
    asyncio.run(_fill(rig, _table(rig, kind), lake))
    rig.psql(f"DELETE FROM swept WHERE ctid IN (SELECT ctid FROM swept LIMIT {GONE})")
    rig.psql("VACUUM ANALYZE swept")
    psql: list[str | Path] = [rig.server.program("psql"), "--no-psqlrc", rig.server.dsn()]
    reference_s = timed([*psql, "-c", "\\copy (select id from swept) to /dev/null"])
    command = [sys.executable, "-m", "benchmarks.daemon.sweep", kind, rig.server.dsn(), str(lake)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    rig.psql("DROP TABLE swept")
    return {**found, "reference_s": reference_s}


def _table(rig: Rig, kind: str) -> Table:
    oid = int(rig.psql("SELECT 'swept'::regclass::oid").strip())
    return _described(kind, oid)


def _described(kind: str, oid: int) -> Table:
    return Table(TableId("public", "swept"), oid, (KINDS[kind][0],), "d", ("id",), ("id",))


async def _fill(rig: Rig, table: Table, lake: Path) -> None:
    """Write the table to a lake, as its snapshot would."""
    sink = DeltaLake(str(lake), "bench")
    await sink.open()
    await sink.adopt("bench")
    schema = change_schema(table)
    writer = sink.begin_epoch()
    async with (
        await connect(rig.server.dsn(), autocommit=False) as connection,
        aclosing(KeyPages(table, UNLIMITED_BYTES).pages(connection)) as pages,
    ):
        async for page in pages:
            batch = _read_rows(schema, page.decoded())
            await writer.append_batch(TableBatch(table, batch, page.nbytes))
    await writer.commit(EpochSummary(Lsn(100), Lsn(200), _AT, 1, 0))
    await sink.close()


def _read_rows(schema: pa.Schema, keys: pa.RecordBatch) -> pa.RecordBatch:
    values = {"_cdc_op": "r", "_cdc_lsn": 100, "_cdc_seq": 0, "_cdc_ts": _AT}
    arrays = [keys.column("id")]
    for field in list(schema)[1:]:
        value = pa.scalar(values.get(field.name), field.type)
        arrays.append(pa.repeat(value, keys.num_rows))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


# --- in the measured process ------------------------------------------------------------------


async def _sweep(kind: str, dsn: str, lake: str) -> dict[str, float]:
    settings = PollingSettings.model_validate(
        {"kind": "polling", "dsn": dsn, "tables": ["public.swept"]}
    )
    async with await connect(dsn) as connection:
        cursor = await connection.execute("SELECT 'public.swept'::regclass::oid::int8")
        row = await cursor.fetchone()
    assert row is not None
    table, log = _described(kind, row[0]), DeltaLake(lake, "bench")
    before_mb = _peak_mb()
    began = time.perf_counter()
    keys = await KeySet.load(log, table, limit_bytes=1 << 30)
    assert keys is not None
    loaded = time.perf_counter()
    loaded_mb = _peak_mb()
    sweep = Sweep(settings, table, keys, log, key_bytes=1 << 30, row_limit_bytes=UNLIMITED_BYTES)
    found = 0
    async with await connect(dsn, autocommit=False) as connection:
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        async with aclosing(sweep.missing()) as batches:
            async for rows in batches:
                found += (await absent(connection, table, rows, UNLIMITED_BYTES)).num_rows
    return {
        "load_s": loaded - began,
        "sweep_s": time.perf_counter() - loaded,
        "before_mb": before_mb,
        "loaded_mb": loaded_mb,
        "peak_mb": _peak_mb(),
        "found": found,
    }


def _peak_mb() -> float:
    """Return the peak of this process's resident memory."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    [peak] = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(peak) * 1024 / 1e6


def _main(arguments: Sequence[str]) -> None:
    if len(arguments) == 3:
        print(json.dumps(asyncio.run(_sweep(*arguments))))
        return
    with rig() as server:
        rows = int(arguments[0]) if arguments else QUICK_ROWS
        for kind, found in measure(server, rows).items():
            print(kind, *(f"{name} {value:,.1f}" for name, value in found.items()), sep="  ")


if __name__ == "__main__":
    _main(sys.argv[1:])

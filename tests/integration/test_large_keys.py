"""Keys of any size in a sweep: they are held one page at a time, and none that is too large (I9).

Each case runs in a process of its own, which has nothing else in its memory.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from ingestd.model.errors import TableError
from ingestd.model.row_checks import row_limit_bytes
from ingestd.model.schema import Column, Mask, Table
from ingestd.postgres.catalog.tables import describe, list_tables
from ingestd.postgres.connection.session import connect
from ingestd.postgres.polling.keys.delete_sweep import Sweep, absent
from ingestd.postgres.polling.keys.key_set import KeySet
from ingestd.postgres.settings import PollingSettings

if TYPE_CHECKING:
    from ingestd.model.schema import TableId
    from tests.harness.databases import Database

PEAK_BYTES = 64_000_000 + 200_000_000
"""`limits.memory` at its least, and what the rest of a process may take."""
ROW_LIMIT_BYTES = row_limit_bytes(64_000_000 // 4)
ROWS = 1500
LONG = "repeat('x', 190000) || n"
"""What an index's entry has room for, compressed."""
TABLES = {
    "many": ('id text COLLATE "C" PRIMARY KEY', LONG),
    "among small ones": (
        'id text COLLATE "C" PRIMARY KEY',
        "repeat('x', n % 9 / 5 * 190000) || '-' || n",
    ),
    "of two columns": (
        'a text COLLATE "C", id text COLLATE "C", PRIMARY KEY (a, id)',
        "repeat('x', 90000) || n, repeat('y', 90000) || n",
    ),
    "with a number": ('n int, id text COLLATE "C", PRIMARY KEY (n, id)', f"n, {LONG}"),
    "of bytes": ("id bytea PRIMARY KEY", f"convert_to({LONG}, 'UTF8')"),
    "of numbers": ("id numeric PRIMARY KEY", "1e130000 + n"),
    "that are equal to short ones": (
        "id numeric PRIMARY KEY",
        "(n || '.' || repeat('0', 16000))::numeric",
    ),
}
GONE = {"sweep": 0, "listed": 500, "all": 500}
"""What a sweep finds where the lake has nothing, and what `absent` does of short keys: by their
texts those that are equal are others too. A masked key can't be listed: then all are read."""


@pytest.mark.thorough
@pytest.mark.attack("table owner")
@pytest.mark.parametrize("case", TABLES)
def test_bounded_large_keys_are_swept_page_by_page(database: Database, case: str) -> None:
    columns, values = TABLES[case]
    database.execute(f"CREATE TABLE t ({columns})")
    database.execute(f"INSERT INTO t SELECT {values} FROM generate_series(1, {ROWS}) n")
    for way, gone in GONE.items():
        found = run(database.dsn, way)
        assert found["fault"] is None
        assert found["gone"] == gone
        assert found["peak"] <= PEAK_BYTES


@pytest.mark.attack("table owner")
@pytest.mark.parametrize(
    ("elements", "fault"),
    [
        (15, None),
        (60, "t: a key of 8 MB, sent as text, is more than a sweep may hold (4 MB"),
        (300, "t: a key of 39 MB, sent as text, is more than a sweep may hold (4 MB"),
        (9000, "larger, as text, than the 1 GB"),
    ],
)
def test_bounded_a_key_too_large_for_a_sweep_is_its_tables_fault(
    database: Database, elements: int, fault: str | None
) -> None:
    database.execute("CREATE TABLE t (id numeric[] PRIMARY KEY)")
    database.execute(f"INSERT INTO t VALUES (array_fill(1e131000, ARRAY[{elements}]))")
    found = run(database.dsn, "sweep")
    assert found["peak"] <= PEAK_BYTES
    if fault is None:
        assert found["fault"] is None
    else:
        assert fault in found["fault"]


def run(dsn: str, way: str) -> dict[str, Any]:
    """Run a way in a process of its own."""
    command = [sys.executable, "-m", "tests.integration.test_large_keys", dsn, way]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    print(f"{way}: {found}")  # noqa: T201
    return found


# --- in the process that is measured ---------------------------------------------------------


class Empty:
    """A lake that has nothing."""

    async def changes(
        self, table: TableId, columns: Sequence[str]
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Return none."""
        del table, columns
        return
        yield


async def gone(dsn: str, way: str) -> int:
    """Return how many keys a way finds deleted."""
    async with await connect(dsn, autocommit=False) as connection:
        rows = [row for row in await list_tables(connection) if row.name == "t"]
        [table] = await describe(connection, rows, before_full=False)
        await connection.rollback()
        if way == "sweep":
            sweep = Sweep(
                PollingSettings.model_validate({"kind": "polling", "dsn": dsn, "tables": ["*.*"]}),
                table,
                KeySet(np.array([1], np.uint64)),
                Empty(),
                key_bytes=1 << 20,
                row_limit_bytes=ROW_LIMIT_BYTES,
            )
            async with aclosing(sweep.missing()) as batches:
                counts = [found.num_rows async for found in batches]
            return sum(counts)
        if way == "all":
            table = replace(table, columns=tuple(map(masked, table.columns)))
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        found = await absent(connection, table, short_keys(table), ROW_LIMIT_BYTES)
        return len(found)


def masked(column: Column) -> Column:
    return replace(column, mask=Mask("sha256", b"key"), type=pa.string())


def short_keys(table: Table) -> pa.RecordBatch:
    texts = pa.array([str(n) for n in range(1, 501)])
    arrays = {table.column(n).lake_name: texts.cast(table.column(n).type) for n in table.key}
    raw = pa.nulls(len(texts), pa.map_(pa.string(), pa.string()))
    return pa.RecordBatch.from_pydict({**arrays, "_cdc_raw": raw})


def main(dsn: str, way: str) -> None:
    found: dict[str, Any] = {"gone": 0, "fault": None, "remedy": None}
    try:
        found["gone"] = asyncio.run(gone(dsn, way))
    except TableError as fault:
        found |= {"fault": str(fault), "remedy": fault.remedy}
    status = Path("/proc/self/status").read_text(encoding="ascii")
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    sys.stdout.write(json.dumps({**found, "peak": 1024 * int(line.split()[1])}))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""`_tables` of earlier versions of ingestd is read, completed and written on."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from ingestd.decode.lake_columns import allocate
from ingestd.lake.delta.append_log import AppendLog, Creation
from ingestd.lake.delta.read import conform
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.epochs_table import EpochTable
from ingestd.lake.parquet_writer import FragmentWriter
from ingestd.lake.registry_table import SCHEMA
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from ingestd.lake.store.store import open_store
from ingestd.model.lake_state import TableEvent, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TIMESTAMP, TableId
from tests.unit.lake.rows import AT, inserts, make_table, summary

if TYPE_CHECKING:
    from pathlib import Path


T = make_table("orders")

OLD_COLUMN = pa.struct(
    [
        ("name", pa.string()),
        ("pg_type", pa.string()),
        ("type_oid", pa.int64()),
        ("typmod", pa.int32()),
        ("delta_type", pa.string()),
        ("identity", pa.bool_()),
        ("nullable", pa.bool_()),
        ("comment", pa.string()),
        ("missing", pa.string()),
    ]
)
OLD_SCHEMA = pa.schema(
    [
        ("table", pa.string()),
        ("oid", pa.int64()),
        ("schema_version", pa.int32()),
        ("state", pa.string()),
        ("reason", pa.string()),
        ("snapshot_lsn", pa.int64()),
        ("at_lsn", pa.int64()),
        ("at", TIMESTAMP),
        ("replica_identity", pa.string()),
        ("columns", pa.list_(pa.field("element", OLD_COLUMN))),
    ]
)


def old_row(**values: object) -> dict[str, Any]:
    columns: list[dict[str, Any]] = [
        {"name": "id", "pg_type": "integer", "type_oid": 23, "delta_type": "integer"},
        {"name": "note", "pg_type": "text", "type_oid": 25, "delta_type": "string"},
    ]
    flags = {"typmod": -1, "nullable": True}
    return {
        "table": "public.orders",
        "oid": 1,
        "schema_version": 1,
        "state": "live",
        "snapshot_lsn": 100,
        "at_lsn": 100,
        "at": AT,
        "replica_identity": "d",
        "columns": [{**c, **flags, "identity": c["name"] == "id"} for c in columns],
        **values,
    }


def write_old_registry(lake: Path, rows: list[dict[str, Any]]) -> None:
    """Make `_tables` as ingestd did before lake columns had a `source_name`, after `_epochs`."""
    epochs = EpochTable(
        AppendLog(open_store(str(lake), None), "shop/_epochs", "ingestd/shop"), lambda _: None
    )
    epochs.load()
    epochs.adopt("7000000000000000001")
    log = AppendLog(open_store(str(lake), None), "shop/_tables", "ingestd/shop")
    log.load()
    log.create(Creation(OLD_SCHEMA, {"delta.checkpointInterval": "20"}))
    writer = FragmentWriter(log.store, log.folder, ())
    writer.write([pa.Table.from_pylist(rows, OLD_SCHEMA)])
    log.commit_files(writer.finish())


async def test_a_lake_without_source_names_is_read_and_completed(tmp_path: Path) -> None:
    write_old_registry(tmp_path, [old_row(), old_row(table="public.none", columns=[])])
    sink = DeltaLake(str(tmp_path), "shop")
    before = (await sink.open()).tables[T.id]
    assert [(c.name, c.source_name) for c in before.columns] == [("id", "id"), ("note", "note")]
    assert (before.state, before.fingerprint, before.schema_version) == (TableState.LIVE, "", 1)

    await sink.adopt("7000000000000000001")
    await sink.adopt("7000000000000000001")
    event = TableEvent(T, TableState.LIVE, AT, Lsn(200), Lsn(100))
    await sink.record([event])
    stored_apart = replace(
        T, columns=(T.columns[0], replace(T.columns[1], stored_as="note__v2")), fingerprint="7"
    )
    await sink.record([replace(event, table=stored_apart)])
    await sink.close()

    again = (await sink.open()).tables
    await sink.close()
    assert again[T.id].schema_version == 3  # its key was not recorded either
    assert again[T.id].fingerprint == "7"
    assert [(c.name, c.source_name) for c in again[T.id].columns] == [
        ("id", "id"),
        ("note__v2", "note"),
    ]
    assert list(again[T.id].lake_columns) == ["id", "note", "note__v2"]
    assert again[TableId("public", "none")].columns == ()


async def test_an_event_without_columns_leaves_those_of_before(tmp_path: Path) -> None:
    sink = DeltaLake(str(tmp_path), "shop")
    await sink.open()
    await sink.adopt("7000000000000000001")
    event = TableEvent(T, TableState.LIVE, AT, Lsn(200), Lsn(100))
    doubted = replace(T, columns=(), fingerprint="doubted")
    await sink.record([event, replace(event, table=doubted)])
    await sink.record([replace(event, table=doubted)])
    await sink.close()

    known = (await sink.open()).tables[T.id]
    await sink.close()
    assert (known.fingerprint, known.schema_version) == ("doubted", 1)
    assert [c.name for c in known.columns] == ["id", "note"]


async def test_the_lakes_types_count_where_the_registry_is_ahead(
    tmp_path: Path,
) -> None:
    """A table that stopped because a column's type changed: the new type was never written."""
    sink = DeltaLake(str(tmp_path), "shop")
    await sink.open()
    await sink.adopt("7000000000000000001")
    writer = sink.begin_epoch()
    await writer.append_batch(inserts(T, 100, 1))
    await writer.commit(summary(100, 110))
    longer = replace(T, columns=(replace(T.columns[0], type=pa.int64()),))
    await sink.record([TableEvent(longer, TableState.STOPPED, AT, Lsn(200), reason="type")])

    known = (await sink.open()).tables[T.id]
    await sink.close()
    assert [c.lake_type for c in known.columns] == ["long"]
    assert {n: c.lake_type for n, c in known.lake_columns.items()} == {
        "id": "integer",
        "note": "string",
    }
    (column,) = allocate(longer.columns, known.lake_columns)
    assert (column.lake_name, column.type) == ("id__v2", pa.int64())


async def test_other_readers_see_all_fields_of_a_completed_registry(tmp_path: Path) -> None:
    write_old_registry(tmp_path, [old_row()])
    sink = DeltaLake(str(tmp_path), "shop")
    await sink.open()
    await sink.adopt("7000000000000000001")
    await sink.record([TableEvent(T, TableState.LIVE, AT, Lsn(200), Lsn(100))])
    await sink.close()

    table = DeltaTable(str(tmp_path / "shop" / "_tables"))
    assert pa.schema(table.schema().to_arrow()).equals(SCHEMA)
    query = "select at_lsn, columns[2]['source_name'], storage from t order by at_lsn"
    rows = pa.table(QueryBuilder().register("t", table).execute(query).read_all())
    assert [tuple(row.values()) for row in rows.to_pylist()] == [
        (100, None, None),
        (200, "note", ""),
    ]


def test_lists_of_structs_get_the_fields_they_lack() -> None:
    old = pa.list_(pa.struct([("a", pa.int32())]))
    new = pa.list_(pa.struct([("a", pa.int32()), ("b", pa.string())]))
    table = pa.table({"x": pa.array([[{"a": 1}, None], None, [], [{"a": 2}]], old)}).slice(1)
    read = conform(table, pa.schema([("x", new)]))
    assert read.column("x").to_pylist() == [None, [], [{"a": 2, "b": None}]]


class WaitingStore(LocalStore):
    """Looks for a file of T only once `overtaken`, or after a second; from `waits` on."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, Fsync())
        self.waits = False
        self.began = threading.Event()
        self.overtaken = threading.Event()

    def size(self, path: str) -> int | None:
        if self.waits and "/public/" in path and not self.began.is_set():
            self.began.set()
            self.overtaken.wait(1)
        return super().size(path)


async def test_isolated_events_are_recorded_in_the_given_order(tmp_path: Path) -> None:
    """A table that stops while its snapshot begins is not being read after its stop."""
    store = WaitingStore(tmp_path)

    def before_commit(_: str) -> None:
        if store.began.is_set():
            store.overtaken.set()

    sink = DeltaLake(str(tmp_path), "shop", before_commit=before_commit, store=store)
    await sink.open()
    await sink.adopt("7000000000000000001")
    live = TableEvent(T, TableState.LIVE, AT, Lsn(200), Lsn(100))
    await sink.record([live])
    writer = sink.begin_epoch()
    await writer.append_batch(inserts(T, 300, 1))
    await writer.commit(summary(300, 305))
    store.waits = True
    first = asyncio.create_task(sink.record([replace(live, state=TableState.SNAPSHOTTING)]))
    assert await asyncio.to_thread(store.began.wait, 60)
    await sink.record([replace(live, state=TableState.STOPPED, reason="damaged")])
    await first
    await sink.close()
    assert (await sink.open()).tables[T.id].state is TableState.STOPPED
    await sink.close()

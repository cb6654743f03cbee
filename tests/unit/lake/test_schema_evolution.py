"""Schemas only grow, and never by a cast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema

from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.schema_evolution import SchemaConflictError, additions, evolved
from ingestd.model.schema import Column, Table
from tests.unit.lake.rows import inserts, make_table, summary

if TYPE_CHECKING:
    from pathlib import Path

NOTE_2 = Column("note_2", 25, -1, pa.string(), "text")

LAKE = pa.schema([("id", pa.int32()), ("_cdc_before", pa.struct([("id", pa.int32())]))])


def test_new_columns_and_fields_are_added_in_place() -> None:
    rows = pa.schema([("note", pa.string()), ("_cdc_before", pa.struct([("note", pa.string())]))])
    whole = evolved(LAKE, rows)
    before = pa.struct([("id", pa.int32()), ("note", pa.string())])
    assert whole == pa.schema([("id", pa.int32()), ("_cdc_before", before), ("note", pa.string())])
    assert [f.name for f in additions(LAKE, whole)] == ["_cdc_before", "note"]
    assert additions(whole, whole) == []


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (pa.schema([("id", pa.int64())]), "integer in the lake, but its rows are now long"),
        (pa.schema([("ID", pa.int32())]), "only by case"),
        (pa.schema([("t", pa.time64("us"))]), "no Delta type"),
        (pa.schema([("_cdc_before", pa.struct([("id", pa.string())]))]), "_cdc_before.id"),
    ],
)
def test_lossless_what_does_not_fit_is_refused(rows: pa.Schema, message: str) -> None:
    with pytest.raises(SchemaConflictError, match=message):
        evolved(LAKE, rows)


async def test_columns_that_another_adds_meanwhile_are_not_added_again(tmp_path: Path) -> None:
    """A table's columns are not compared at each commit, but where one side is another."""
    table = make_table("t")
    wider = make_table("t", Column("size", 20, -1, pa.int64(), "bigint"))
    lake = DeltaLake(str(tmp_path), "shop")
    await lake.open()
    await lake.adopt("1")

    async def commit(lsn: int, of: Table) -> int:
        writer = lake.begin_epoch()
        await writer.append_batch(inserts(of, lsn, lsn))
        [committed] = (await writer.commit(summary(lsn, lsn + 1))).tables
        return committed.version

    first = await commit(10, table)
    assert await commit(20, table) == first + 1
    folder = tmp_path / lake.layout.raw(table.id)
    DeltaTable(folder).alter.add_columns(
        Schema.from_arrow(pa.schema([("size", pa.int64())])).fields
    )
    assert await commit(30, table) == first + 3
    assert await commit(40, wider) == first + 4
    assert await commit(50, make_table("t", NOTE_2)) == first + 6
    await lake.close()
    names = DeltaTable(folder).to_pyarrow_table().column_names
    assert {"size", "note_2"} <= set(names)

"""What of a raw table counts at a point, and which tables can't be compared."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from ingestd.digests.row_digests import DigestedText, key_digests, value_hashes
from ingestd.lake.verify.change_values import values_of_changes
from ingestd.lake.verify.lake import DeltaVerifiedLake
from ingestd.model.errors import TableChangedError, TableError
from ingestd.model.lsn import Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import Column, Table
from ingestd.pipeline.verify.fold import fold_digests
from ingestd.ports.verify import KEY, VerifyPoint
from tests.harness.raw_lake import RawLake
from tests.unit.lake.rows import make_table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ingestd.ports.verify import Digested, ValueRows

TABLE = make_table("orders")
FOLDER = "shop/public/orders"
MOST_LINKED = 1000


@pytest.fixture
def raw(tmp_path: Path) -> RawLake:
    return RawLake(tmp_path / "lake")


def commit(raw: RawLake, table: Table, *rows: dict[str, Any]) -> int:
    """Commit changes at the next position; return it."""
    lsn = raw.next_lsn()
    raw.commit({table: [{"_cdc_lsn": lsn, "_cdc_seq": n, **row} for n, row in enumerate(rows, 1)]})
    return lsn


def live(raw: RawLake, *tables: Table, at_lsn: int | None = None) -> None:
    raw.record("live", *tables, snapshot_lsn=100, at_lsn=at_lsn)


async def rows_at(raw: RawLake, table: Table, point: VerifyPoint) -> ValueRows:
    """The existing rows, as values; the same by numbers."""
    lake = DeltaVerifiedLake(str(raw.uri), "shop")
    try:
        await lake.known()
        digested = await lake.survey(await lake.describe(table), point, most_linked=MOST_LINKED)
        found: Counter[int] = Counter()
        every: list[Any] = []
        async with aclosing(lake.changes(digested)) as changes:
            every = [matrix async for matrix in changes]
        if every:
            matrix = np.concatenate(every)
            folded = fold_digests(matrix, digested)
            found.update(folded.keys.tolist())
            keys = set(matrix[:, KEY].tolist())
        else:
            keys = set()
        rows = await lake.rows_of(digested, keys)
        await lake.ensure_unchanged(table)
    finally:
        await lake.close()
    assert len(rows) == found.total()
    return sorted(rows, key=lambda row: str(row["id"]))


def everything(raw: RawLake) -> VerifyPoint:
    return VerifyPoint(Lsn(raw.lsn + 1))


def test_what_the_snapshot_does_not_see_is_left_out(raw: RawLake) -> None:
    live(raw, TABLE)
    commit(raw, TABLE, {"id": 1, "note": "a", "_cdc_xid": 5}, {"id": 2, "note": "a", "_cdc_xid": 5})
    commit(raw, TABLE, {"id": 1, "note": "b", "_cdc_op": "u", "_cdc_xid": 7})
    unseen = commit(raw, TABLE, {"id": 2, "_cdc_op": "d", "_cdc_xid": 9})
    above = commit(raw, TABLE, {"id": 3, "note": "c", "_cdc_xid": 8})

    async def notes(point: VerifyPoint) -> dict[int, str]:
        return {row["id"]: row["note"] for row in await rows_at(raw, TABLE, point)}

    assert asyncio.run(notes(VerifyPoint(Lsn(above)))) == {1: "b"}
    seen = PgSnapshot(7, 10, frozenset({7, 9}))
    assert asyncio.run(notes(VerifyPoint(Lsn(above), seen))) == {1: "a", 2: "a"}
    assert asyncio.run(notes(VerifyPoint(Lsn(above), PgSnapshot(8, 8)))) == {1: "b", 2: "a"}
    assert asyncio.run(notes(VerifyPoint(Lsn(unseen)))) == {1: "b", 2: "a"}
    assert asyncio.run(notes(VerifyPoint(Lsn(above), is_exact=False))) == {1: "b", 3: "c"}


def test_ids_that_have_come_round_are_those_of_old_rows() -> None:
    lsn = np.array([10, 1 << 40, 1 << 40])
    xids = np.array([900, 900, -1])
    point = VerifyPoint(Lsn((1 << 40) + 1), PgSnapshot(800, 800))
    assert point.sees(lsn, np.ones(3, np.int64), xids).tolist() == [True, False, True]


def test_rows_that_were_read_at_the_very_position_count(raw: RawLake) -> None:
    """On an idle source nothing lies between the reading of a table and its verification."""
    live(raw, TABLE)
    read = [{"id": n, "_cdc_op": "r", "_cdc_seq": 0, "_cdc_xid": None} for n in (1, 2)]
    lsn = commit(raw, TABLE, {"id": 9, "_cdc_op": "t", "_cdc_seq": -1}, *read, {"id": 3})
    rows = asyncio.run(rows_at(raw, TABLE, VerifyPoint(Lsn(lsn), PgSnapshot(1, 1))))
    assert [row["id"] for row in rows] == [1, 2]


async def test_a_row_has_its_value_from_any_of_its_columns_or_default(
    tmp_path: Path,
) -> None:
    raw = RawLake(tmp_path / "lake")
    old = make_table("orders", Column("n", 1700, 1, pa.decimal128(5, 2), "numeric(5,2)"))
    new = make_table(
        "orders",
        Column("n", 1700, 2, pa.decimal128(9, 2), "numeric(9,2)", stored_as="n__v2"),
        Column("added", 23, -1, pa.int32(), "integer", missing="7"),
        Column("day", 1082, -1, pa.date32(), "date", missing="infinity"),
    )

    def write() -> None:
        live(raw, old)
        first = {"id": 1, "note": "x", "n": Decimal("1.50")}
        commit(raw, old, first, {"id": 2, "_cdc_raw": [("n", "NaN")]})
        live(raw, new)
        commit(raw, new, {"id": 3, "n__v2": Decimal("2.50"), "added": None})

    await asyncio.to_thread(write)
    rows = await rows_at(raw, new, everything(raw))
    assert [[str(v) for v in row.values()] for row in rows] == [
        ["1", "x", "1.50", "7", "infinity"],
        ["2", "None", "NaN", "7", "infinity"],
        ["3", "None", "2.50", "None", "None"],
    ]
    assert isinstance(rows[1]["n"], DigestedText)


async def test_an_older_value_outside_the_newest_type_counts_as_text(
    tmp_path: Path,
) -> None:
    raw = RawLake(tmp_path / "lake")
    old = make_table("orders", Column("n", 1700, -1, pa.string(), "numeric"))
    kind = pa.decimal128(12, 2)
    new = make_table("orders", Column("n", 1700, -1, kind, "numeric", stored_as="n__v2"))

    def write() -> None:
        live(raw, old)
        commit(raw, old, *({"id": i, "n": n} for i, n in enumerate(("1.50", "NaN", "1.234", None))))
        live(raw, new)
        commit(raw, new, {"id": 7, "n__v2": Decimal("2.50")})

    await asyncio.to_thread(write)
    rows = await rows_at(raw, new, everything(raw))
    found = [row["n"] for row in rows]
    assert found == [Decimal("1.50"), "NaN", "1.234", None, Decimal("2.50")]
    assert [isinstance(n, DigestedText) for n in found] == [False, True, True, False, False]


def test_a_column_that_older_rows_have_nan_in_is_not_altered(raw: RawLake) -> None:
    """NaN is not equal to itself: the table would seem altered each time."""
    key, *_ = TABLE.columns
    kinds = {"one": pa.float64(), "some": pa.list_(pa.float64())}
    missing = {"one": "NaN", "some": "{1,NaN}"}
    added = (Column(n, 0, -1, kinds[n], n, missing=missing[n]) for n in kinds)
    table = replace(TABLE, columns=(key, *added))
    live(raw, table)
    commit(raw, table, {"id": 1})
    [row] = asyncio.run(rows_at(raw, table, everything(raw)))
    assert row["id"] == 1


def test_minus_zero_is_the_key_that_zero_is(raw: RawLake) -> None:
    """Polling sees one turn into the other, and neither deleted."""
    key, *others = TABLE.columns
    table = replace(TABLE, columns=(replace(key, type=pa.float64()), *others))
    live(raw, table)
    commit(raw, table, {"id": 0.0, "note": "a"})
    commit(raw, table, {"id": -0.0, "note": "b"})
    [row] = asyncio.run(rows_at(raw, table, everything(raw)))
    assert (str(row["id"]), row["note"]) == ("-0.0", "b")


def test_tables_that_are_not_whole_are_refused(raw: RawLake) -> None:
    def refused(match: str, kind: type[TableError] = TableChangedError) -> None:
        with pytest.raises(kind, match=match):
            asyncio.run(rows_at(raw, TABLE, everything(raw)))

    refused("not in the lake yet")
    raw.record("snapshotting", TABLE)
    refused("is being read")
    raw.record("live", TABLE)
    refused("never read", TableError)
    raw.record("stopped", TABLE, reason="too bad")
    refused("is stopped: too bad", TableError)
    raw.record("dropped", TABLE)
    refused("is dropped")


def test_another_key_than_the_changes_have_is_refused(raw: RawLake) -> None:
    columns = tuple(replace(c, identity=c.name == "note") for c in TABLE.columns)
    other = replace(TABLE, columns=columns, key=("note",), before=("note",))
    live(raw, TABLE)
    commit(raw, TABLE, {"id": 1, "note": "a"})
    with pytest.raises(TableChangedError, match="than the lake has recorded so far"):
        asyncio.run(rows_at(raw, other, everything(raw)))
    live(raw, other)
    with pytest.raises(TableError, match="than when its rows were read") as refused:
        asyncio.run(rows_at(raw, other, everything(raw)))
    assert str(refused.value).endswith(f"ingestd snapshot shop {TABLE.id}")
    commit(raw, other, {"_cdc_op": "t"}, {"id": 2, "note": "b"})
    rows = asyncio.run(rows_at(raw, other, everything(raw)))
    assert [row["id"] for row in rows] == [2]


async def test_a_table_resnapshotted_meanwhile_is_detected(raw: RawLake) -> None:
    await asyncio.to_thread(live, raw, TABLE)
    lake = DeltaVerifiedLake(str(raw.uri), "shop")
    await lake.known()
    await lake.survey(await lake.describe(TABLE), everything(raw), most_linked=0)
    await lake.ensure_unchanged(TABLE)
    await asyncio.to_thread(raw.record, "snapshotting", TABLE)
    await asyncio.to_thread(live, raw, TABLE)
    with pytest.raises(TableChangedError, match="was re-read"):
        await lake.ensure_unchanged(TABLE)
    with pytest.raises(TableChangedError, match="was re-read"):
        await lake.survey(await lake.describe(TABLE), everything(raw), most_linked=0)
    await lake.close()


def moved(old: int, new: int) -> dict[str, Any]:
    """A row whose key goes from one to another, without its note."""
    before = {"_cdc_before": {"id": old}, "_cdc_unchanged": ["note"]}
    return {"id": new, "_cdc_op": "u", **before}


async def test_rows_whose_key_changed_are_folded_with_what_they_were(raw: RawLake) -> None:
    """Of all earlier versions, only those of the requested rows are read."""

    def write() -> None:
        live(raw, TABLE)
        commit(raw, TABLE, *({"id": n, "note": f"{n}"} for n in range(20)))
        for step in (100, 200):
            commit(raw, TABLE, *(moved(n + step - 100, n + step) for n in range(20)))

    await asyncio.to_thread(write)
    found = []

    def counted(batch: pa.RecordBatch, digested: Digested) -> ValueRows:
        found.extend(batch.column("id").to_pylist())
        return values_of_changes(batch, digested)

    lake = DeltaVerifiedLake(str(raw.uri), "shop", values=counted)
    await lake.known()
    described = await lake.describe(TABLE)
    with pytest.raises(TableError, match="does not fit into --memory"):
        await lake.survey(described, everything(raw), most_linked=79)
    digested = await lake.survey(described, everything(raw), most_linked=80)
    assert len(digested.linked) == 60
    key = int(key_digests([(value_hashes([203], pa.int32()), pa.int32())], 1)[0])
    assert await lake.rows_of(digested, {key}) == [{"id": 203, "note": "3"}]
    assert sorted(found) == [3, 103, 203]
    await lake.close()


async def test_a_file_of_another_engine_with_other_types_is_checked(
    raw: RawLake,
) -> None:
    await asyncio.to_thread(_two_rows, raw)
    expected = await rows_at(raw, TABLE, everything(raw))
    _cast_files(raw, "id", pa.int64())
    assert await rows_at(raw, TABLE, everything(raw)) == expected
    _cast_files(raw, "id", pa.string(), lambda ids: ["x", *ids[1:]])
    with pytest.raises(TableError, match="a data file has column 'id' as string") as caught:
        await rows_at(raw, TABLE, everything(raw))
    assert "ingestd snapshot shop public.orders" in (caught.value.remedy or "")


async def test_a_raw_table_whose_key_was_made_text_is_refused(raw: RawLake) -> None:
    await asyncio.to_thread(_two_rows, raw)
    handle = DeltaTable(raw.uri / FOLDER)
    schema = pa.schema(handle.schema().to_arrow())
    field = schema.get_field_index("id")
    rows = pa.concat_tables(pq.read_table(uri) for uri in handle.file_uris())
    changed = rows.cast(schema.set(field, pa.field("id", pa.string())))
    write_deltalake(handle, changed, mode="overwrite", schema_mode="overwrite")
    with pytest.raises(TableError, match="column id was integer and is string") as caught:
        await rows_at(raw, TABLE, everything(raw))
    assert "ingestd snapshot shop public.orders" in (caught.value.remedy or "")


def _two_rows(raw: RawLake) -> None:
    live(raw, TABLE)
    commit(raw, TABLE, {"id": 1, "note": "a"}, {"id": 2, "note": "b"})


def _cast_files(
    raw: RawLake,
    name: str,
    kind: pa.DataType,
    edit: Callable[[list[Any]], list[Any]] = lambda values: values,
) -> None:
    for file in (raw.uri / FOLDER).glob("*.parquet"):
        rows = pq.ParquetFile(file).read()
        values = pa.array(edit(rows[name].cast(kind).to_pylist()), kind)
        pq.write_table(rows.set_column(rows.schema.get_field_index(name), name, values), file)

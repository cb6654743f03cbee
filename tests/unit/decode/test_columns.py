"""What the config does to a column: hidden values, another type, another name in the lake."""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode.copy.columnar import ColumnarDecoder
from ingestd.decode.copy.packing import ColumnForm, Packing, form_of
from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.relation import table_of
from ingestd.decode.values.masks import masked, masked_text
from ingestd.decode.values.text_column import texts_of
from ingestd.model.changes import TableBatch, change_schema
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Column, Mask, Table, TableId, with_before
from tests.unit.decode import pgoutput

if TYPE_CHECKING:
    from collections.abc import Sequence

SHA = Mask("sha256", b"key")
NULL = Mask("null")


def digest(text: bytes) -> str:
    return hmac.new(b"key", text, hashlib.sha256).hexdigest()


def decode(columns: dict[str, Column], messages: list[bytes], identity: str) -> list[Any]:
    """Decode messages of relation 1, whose columns have been replaced by these."""
    names = [(c.name, c.type_oid, c.typmod, c.identity) for c in columns.values()]
    relation = pgoutput.relation(1, "t", names, identity=identity)
    decoder = PgoutputDecoder(
        lambda r: with_before(replace(table_of(r), columns=tuple(columns.values())), full=True)
    )
    sent = [pgoutput.begin(100), relation, *messages, pgoutput.commit(100, 108)]
    rows = []
    for chunk in decoder.feed(*pgoutput.laid_out(sent)):
        for batch in chunk.batches:
            batch.rows.validate(full=True)
            assert batch.rows.schema == change_schema(batch.table)
            rows += batch.rows.to_pylist(maps_as_pydicts="strict")
    return rows


def column(name: str, type_oid: int, kind: pa.DataType, **more: Any) -> Column:
    return Column(name, type_oid, -1, kind, **more)


COLUMNS = {
    c.name: c
    for c in (
        column("id", 23, pa.int32(), identity=True),
        column("mail", 25, pa.string(), mask=SHA, identity=True),
        column("born", 1082, pa.string(), mask=SHA, identity=True),
        column("secret", 23, pa.int32(), mask=NULL, identity=True),
        column("Id", 23, pa.int32(), stored_as="Id__2", identity=True),
        column(
            "price", 1700, pa.decimal128(6, 2), is_override=True, stored_as="price__v2",
            identity=True,
        ),
    )
}  # fmt: skip


def test_masked_values_are_hidden_everywhere_and_never_raw() -> None:
    odd = [b"1", b"\xff", b"infinity", b"12", b"x", b"1.005"]
    new = [b"1", "mäil".encode(), None, b"77", b"2", b"1.5"]
    same = [b"2", "mäil".encode(), b"", None, pgoutput.UNCHANGED, b"2"]
    rows = decode(COLUMNS, [pgoutput.update(1, new, odd, "O"), pgoutput.insert(1, same)], "f")
    assert rows[0]["mail"] == rows[1]["mail"] == digest("mäil".encode())
    assert rows[0]["born"] is None
    assert rows[1]["born"] == digest(b"")
    assert rows[0]["secret"] is rows[1]["secret"] is None
    assert rows[0]["_cdc_before"] == {
        "id": 1,
        "mail": digest(b"\xff"),
        "born": digest(b"infinity"),
        "secret": None,
        "Id__2": None,
        "price__v2": None,
    }
    assert rows[0]["_cdc_raw"] == {
        "_cdc_before.Id__2": "x",
        "_cdc_before.price__v2": "1.005",
    }
    assert rows[0]["price__v2"] == Decimal("1.50")
    assert rows[1]["_cdc_unchanged"] == ["Id__2"]


@given(st.lists(st.none() | st.binary(max_size=4)))
def test_masked_equals_hmac_of_each(values: list[bytes | None]) -> None:
    array = masked(texts_of(pa.array(values, pa.binary())), SHA)
    array.validate(full=True)
    assert array.to_pylist() == [None if v is None else digest(v) for v in values]
    assert masked(texts_of(pa.array(values, pa.binary())), NULL).null_count == len(values)


def test_masked_text() -> None:
    assert masked_text("mäil", SHA) == digest("mäil".encode())
    assert masked_text(None, SHA) is masked_text("x", NULL) is None
    assert "key" not in repr(SHA)


@pytest.mark.parametrize(
    ("changed", "form"),
    [
        ({}, ColumnForm.FIXED),
        ({"mask": NULL}, ColumnForm.TEXT),
        ({"mask": SHA, "type": pa.string()}, ColumnForm.TEXT),
        ({"is_override": True, "type": pa.decimal128(12, 2)}, ColumnForm.TEXT),
        ({"stored_as": "other"}, ColumnForm.FIXED),
        ({"type_oid": 99_999}, ColumnForm.TEXT),
        ({"type_oid": 1007, "type": pa.list_(pa.field("element", pa.int32()))}, ColumnForm.TEXT),
    ],
)
def test_form_of_packed_column(changed: dict[str, Any], form: ColumnForm) -> None:
    assert form_of(replace(column("n", 23, pa.int32()), **changed)) is form


def test_packed_columns_by_their_names_in_the_lake() -> None:
    columns = (
        Column("N", 23, -1, pa.int32(), nullable=False, stored_as="N__2"),
        Column("b", 17, -1, pa.binary(), stored_as="b__v2"),
        Column("d", 1082, -1, pa.date32(), nullable=False, stored_as="d__v2"),
        Column("s", 25, -1, pa.string(), mask=SHA),
        Column("x", 20, -1, pa.int64(), mask=NULL),
        Column("a", 1007, -1, pa.list_(pa.field("element", pa.int32()))),
    )
    table = Table(TableId("public", "t"), 1, columns)
    fields = [
        struct.pack(">q", 0),
        struct.pack(">i", 2),
        ints([5, 6]),
        *packed([b"\0", b"\1"]),
        ints([0, 2**31 - 1], 1082),
        *packed([b"mail", None]),
        *packed([None, None]),
        *packed([b"{1,NULL}", b"[0:0]={1}"]),
    ]
    run = struct.pack(">h", len(fields)) + b"".join(struct.pack(">i", len(f)) + f for f in fields)
    header = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
    at = datetime(2024, 1, 1, tzinfo=UTC)
    decoder = ColumnarDecoder(table, Lsn(9), at, 64, Packing.MEASURED)
    batch = decoder.feed(*pgoutput.laid_out([header + run, b"\xff\xff"], gap=b""))
    assert isinstance(batch, TableBatch)
    batch.rows.validate(full=True)
    assert batch.rows.schema == change_schema(table)
    found = batch.rows.select(range(6)).to_pylist()
    assert [r["N__2"] for r in found] == [5, 6]
    assert [r["b__v2"] for r in found] == [b"\0", b"\1"]
    assert [str(r["d__v2"]) for r in found] == ["2000-01-01", "None"]
    assert [r["s"] for r in found] == [digest(b"mail"), None]
    assert [r["x"] for r in found] == [None, None]
    assert [r["a"] for r in found] == [[1, None], None]
    raw = batch.rows.column("_cdc_raw").to_pylist(maps_as_pydicts="strict")
    assert raw == [None, {"d__v2": "infinity", "a": "[0:0]={1}"}]


def ints(values: Sequence[int | None], oid: int = 23) -> bytes:
    out = struct.pack(">iiiii", 1, None in values, oid, len(values), 1)
    items = (struct.pack(">i", -1) if v is None else struct.pack(">ii", 4, v) for v in values)
    return out + b"".join(items)


def packed(values: list[bytes | None]) -> tuple[bytes, bytes]:
    lengths = [None if v is None else len(v) for v in values]
    return b"".join(v or b"" for v in values), ints(lengths)

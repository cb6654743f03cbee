"""Which rows the server can be asked for by the lake's values of their keys."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ingestd.model.schema import Column, Mask, Table, TableId
from ingestd.postgres.snapshot.incremental_choice import can_be_incremental
from ingestd.postgres.snapshot.key_lookup import bare_literal, can_be_found

TEXT, INT8, NUMERIC, FLOAT8 = 25, 20, 1700, 701


def column(
    kind: pa.DataType, oid: int = TEXT, *, is_override: bool = False, mask: Mask | None = None
) -> Column:
    return Column("k", oid, -1, kind, identity=True, is_override=is_override, mask=mask)


@pytest.mark.parametrize(
    ("key", "is_found"),
    [
        (column(pa.string()), True),
        (column(pa.int64()), True),
        (column(pa.decimal128(12, 2)), True),
        (column(pa.list_(pa.int64())), False),
        (column(pa.string(), mask=Mask("sha256")), False),
        (column(pa.string(), is_override=True), True),
        (column(pa.decimal128(12, 2), is_override=True), False),
        (column(pa.timestamp("us"), is_override=True), False),
        (column(pa.float64(), is_override=True), False),
        (column(pa.int64(), INT8, is_override=True), True),
        (column(pa.decimal128(20, 0), INT8, is_override=True), True),
        (column(pa.decimal128(12, 2), NUMERIC, is_override=True), True),
        (column(pa.float64(), FLOAT8, is_override=True), True),
        (column(pa.string(), FLOAT8, is_override=True), True),
    ],
)
def test_a_key_is_found_by_the_text_that_the_source_has(key: Column, *, is_found: bool) -> None:
    """A decimal of two digits, for example, returns ``0.50`` for a text ``0.5``."""
    assert can_be_found(key) is is_found
    table = Table(TableId("public", "t"), 7, (key,), key=("k",))
    assert can_be_incremental(table) is is_found


def test_a_literal_has_no_type_whatever_its_bytes() -> None:
    """So that the server takes it for the column's: a char(n) is padded, a text is not."""
    assert bare_literal("it's").as_string(None) == "'it''s'"
    assert bare_literal(b"\xc3\xa9").as_string(None) == r"E'\xc3\xa9'"
    assert bare_literal(b"\xe9'\\").as_string(None) == r"E'\xe9\x27\x5c'"
    assert bare_literal(None).as_string(None) == "NULL"

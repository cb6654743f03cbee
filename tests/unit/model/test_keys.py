from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from ingestd.model.changes import change_schema
from ingestd.model.keys import key_columns, key_rows, new_keys, old_keys
from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ, Column, Table, TableId, with_before

AT = datetime(2024, 5, 6, 7, 8, 9, 5, tzinfo=UTC)


def keyed(*types: pa.DataType) -> Table:
    columns = tuple(Column(f"k{i}", 0, -1, t, identity=True) for i, t in enumerate(types))
    return with_before(Table(TableId("public", "t"), 1, columns), full=False)


def batch(table: Table, *rows: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), change_schema(table))


@pytest.mark.parametrize(
    ("type_", "value", "text"),
    [
        (pa.int64(), -5, "-5"),
        (pa.string(), "A b", "A b"),
        (pa.binary(), b"\x00\xff", "\\x00ff"),
        (pa.bool_(), True, "true"),
        (pa.float64(), 0.1, "0.1"),
        (pa.date32(), date(1, 2, 3), "0001-02-03"),
        (TIMESTAMP, AT, "2024-05-06 07:08:09.000005Z"),
        (TIMESTAMP_NTZ, AT.replace(tzinfo=None), "2024-05-06 07:08:09.000005"),
        (pa.decimal128(10, 2), Decimal("-1.50"), "-1.50"),
    ],
    ids=str,
)
def test_a_key_is_a_text_that_postgres_reads_back(
    type_: pa.DataType, value: object, text: str
) -> None:
    table = keyed(type_)
    assert list(new_keys(table, batch(table, {"k0": value}))) == [(text,)]


@pytest.mark.parametrize("name", [".id", "..id", "[0]", "id"])
def test_a_name_that_arrow_takes_for_a_path_is_a_name(name: str) -> None:
    columns = tuple(Column(n, 0, -1, pa.int64(), identity=n == name) for n in ("id", name))
    columns = tuple({c.lake_name: c for c in columns}.values())
    table = with_before(Table(TableId("public", "t"), 1, columns), full=True)
    values = {c.lake_name: number for number, c in enumerate(columns, 1)}
    rows = batch(table, {"_cdc_before": values, **values})
    assert list(old_keys(table, rows)) == list(new_keys(table, rows)) == [(str(values[name]),)]
    assert key_rows(table, rows).column("_cdc_before").to_pylist() == [{name: values[name]}]


def test_what_a_column_cannot_hold_is_its_own_text() -> None:
    """Two odd values are both null in the column: they are not one key."""
    table = keyed(TIMESTAMP, pa.int32())
    rows = batch(
        table,
        {"k0": None, "k1": 1, "_cdc_raw": [("k0", "infinity")]},
        {"k0": AT, "k1": 1},
        {
            "k0": None,
            "k1": 2,
            "_cdc_before": {"k0": None, "k1": 1},
            "_cdc_raw": [("k0", "-infinity"), ("_cdc_before.k0", "infinity")],
        },
    )
    assert [k[0] for k in new_keys(table, rows)] == [
        "infinity",
        "2024-05-06 07:08:09.000005Z",
        "-infinity",
    ]
    changed = rows.filter(rows.column("_cdc_before").is_valid())
    assert list(old_keys(table, changed)) == [("infinity", "1")]


def test_a_key_that_was_not_sent_is_the_one_of_before() -> None:
    table = keyed(pa.int32(), pa.string())
    rows = batch(
        table,
        {"k0": 1, "k1": None, "_cdc_before": {"k0": 1, "k1": "far"}, "_cdc_unchanged": ["k1"]},
        {"k0": 2, "k1": "b"},
    )
    assert list(new_keys(table, rows)) == [("1", "far"), ("2", "b")]


def test_a_text_that_is_no_utf8_is_its_bytes() -> None:
    table = keyed(pa.string())
    rows = batch(table, {"k0": None, "_cdc_raw": [("k0", "\\xe931")]}, {"k0": "\\xe931"})
    assert list(new_keys(table, rows)) == [(b"\xe91",), ("\\xe931",)]


def test_the_key_columns_alone_are_enough() -> None:
    table = keyed(pa.int32(), pa.string())
    rows = batch(table, {"k0": 1, "k1": "a", "_cdc_before": {"k0": 2, "k1": "b"}})
    narrow = rows.select(key_columns(table))
    assert list(new_keys(table, narrow)) == [("1", "a")]
    assert list(old_keys(table, narrow)) == [("2", "b")]

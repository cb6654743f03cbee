"""Whether rows are the same, in any order."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from ingestd.lake.reference.digest import ContentDigest
from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ

SCHEMA = pa.schema(
    [
        ("i", pa.int32()),
        ("t", pa.string()),
        ("b", pa.binary()),
        ("d", pa.decimal128(20, 3)),
        ("f", pa.float64()),
        ("o", pa.bool_()),
        ("day", pa.date32()),
        ("at", TIMESTAMP),
        ("local", TIMESTAMP_NTZ),
        ("l", pa.list_(pa.field("element", pa.string()))),
        ("m", pa.map_(pa.string(), pa.string())),
        ("s", pa.struct([("x", pa.int64()), ("y", pa.list_(pa.int32()))])),
    ]
)


def row(number: int) -> dict[str, Any]:
    if number % 5 == 0:
        return {"i": number}
    day = dt.date(2026, 1, 1) + dt.timedelta(days=number)
    at = dt.datetime(2026, 1, 1, number % 24, tzinfo=dt.UTC)
    return {
        "i": number,
        "t": "ü" * (number % 7),
        "b": bytes([number % 256]) * (number % 3),
        "d": Decimal(number) / 8,
        "f": number / 3,
        "o": number % 2 == 0,
        "day": day,
        "at": at,
        "local": at.replace(tzinfo=None),
        "l": [None, "", str(number)][: number % 4],
        "m": [("", None), ("k", str(number))][: number % 3],
        "s": {"x": number, "y": [number, None]},
    }


def batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


def digest(*batches: pa.RecordBatch) -> str:
    found = ContentDigest()
    for one in batches:
        found.add_batch(one)
    return found.text


ROWS = [row(n) for n in range(100)]


def test_order_and_batches_do_not_matter() -> None:
    shuffled = list(ROWS)
    random.Random(1).shuffle(shuffled)
    whole = batch(shuffled)
    assert digest(batch(ROWS)) == digest(whole.slice(0, 7), whole.slice(7, 61), whole.slice(68))


@pytest.mark.parametrize("name", SCHEMA.names)
def test_any_other_value_matters(name: str) -> None:
    other = [dict(r) for r in ROWS]
    other[1][name], other[98][name] = other[98][name], other[1][name]
    assert digest(batch(other)) != digest(batch(ROWS))
    other = [dict(r) for r in ROWS]
    other[4][name] = None
    assert digest(batch(other)) != digest(batch(ROWS))


def test_duplicates_count() -> None:
    assert digest(batch([*ROWS, ROWS[1], ROWS[1]])) != digest(batch([*ROWS, ROWS[2], ROWS[2]]))
    assert digest(batch([*ROWS, ROWS[1], ROWS[1]])) != digest(batch(ROWS))

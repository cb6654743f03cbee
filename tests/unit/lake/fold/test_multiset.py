"""Rows of tables without a key differ, whatever a client of the source chooses."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ingestd.lake.fold.multiset import RAW, MultisetRows
from ingestd.lake.fold.raw_texts import RAW_TYPE
from tests.harness.colliding import integer_like_null, pair_like, texts_of_one_hash

PAIRS = [{"a": 1, "b": 7}, {"a": 2, "b": pair_like(1, 7, 2)}]
ALIKE = {
    "texts": pa.array(texts_of_one_hash()),
    "bytes": pa.array(texts_of_one_hash()).cast(pa.binary()),
    "an integer and null": pa.array([integer_like_null(), None], pa.int64()),
    "structures": pa.array(PAIRS, pa.struct([("a", pa.int64()), ("b", pa.int64())])),
    "lists": pa.array([[text] for text in texts_of_one_hash()]),
}
"""Values of one column that have the same hash without a salt."""


@pytest.mark.attack("table owner")
@pytest.mark.parametrize("values", ALIKE.values(), ids=ALIKE)
def test_refuted_a_client_can_t_choose_two_equal_rows(values: pa.Array) -> None:
    """Deleting one of them could remove the other from all that readers see."""
    rows = pa.table({"v": values, "w": [0, 0], RAW: pa.nulls(2, RAW_TYPE)})
    first, second = MultisetRows(["v", "w"]).hashes(rows)
    assert first != second

"""A client of the source can't choose the share of a fold: its rows must fit in memory."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from ingestd.digests.value_hashes import BLOCKS, HashBlocks
from ingestd.lake.reference.raw_changes import hashes_of, is_in_share, share_of
from tests.harness.colliding import integers_of_multiples, texts_of_same_hash

pytestmark = pytest.mark.attack("table owner")

ROWS = 200
OF_ALL = 232_792_560
"""The least common multiple of 1 to 20, so for any number of shares up to that."""
CHOSEN = {
    "numbers": pa.table({"id": integers_of_multiples(OF_ALL, ROWS)}),
    "numbers of even hashes": pa.table({"id": integers_of_multiples(1 << 20, ROWS)}),
    "texts": pa.table({"id": texts_of_same_hash(ROWS)}),
    "pairs": pa.table({"id": texts_of_same_hash(ROWS), "n": [1] * ROWS}),
}


@pytest.mark.parametrize("kind", CHOSEN)
@pytest.mark.parametrize("shares", [2, 3, 8, 16])
def test_chosen_keys_are_in_all_shares(kind: str, shares: int) -> None:
    rows, blocks = CHOSEN[kind], HashBlocks.salted()
    key = rows.column_names
    flags = [is_in_share(rows, key, n, shares, None, blocks=blocks) for n in range(shares)]
    assert (np.sum(flags, axis=0) == 1).all()
    assert max(int(each.sum()) for each in flags) < ROWS / shares * 1.5 + 30


@pytest.mark.parametrize("kind", ["texts", "pairs"])
def test_without_a_salt_they_are_in_one(kind: str) -> None:
    rows = CHOSEN[kind]
    assert len(set(share_of(hashes_of(rows, rows.column_names, BLOCKS), 16).tolist())) == 1

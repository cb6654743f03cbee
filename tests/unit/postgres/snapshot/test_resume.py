from __future__ import annotations

import pytest

from ingestd.model.errors import TableReplacedError
from ingestd.model.lsn import Lsn
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.partitions import Leaf
from ingestd.postgres.snapshot.ctid_splits import split_blocks
from ingestd.postgres.snapshot.resume import SnapshotRemainder, remainder_text
from tests.unit.pipeline.fixtures import table

POINT = Lsn.parse("1/2000")
TABLE = table("t")
LEAF = Leaf(oid=7, schema="public", name="t", file=70, blocks=100, nbytes=8192 * 100)
OTHER = Leaf(oid=8, schema="public", name="t_2", file=80, blocks=10, nbytes=8192 * 10)
TARGET = 8192 * 10


def wheres(leaf: Leaf) -> list[str]:
    return [blocks.to_text() for blocks, _ in split_blocks(leaf, 0, leaf.blocks, TARGET)]


def ranges(text: str, leaves: list[Leaf]) -> list[tuple[int, int, int | None]]:
    splits = SnapshotRemainder.parse(text).splits(TABLE, leaves, TARGET * 100)
    found = [BlockRange.parse(split.where) for split in splits]
    return [(blocks.oid, blocks.start, blocks.end) for blocks in found]


def test_neighbouring_splits_are_written_as_one() -> None:
    splits = wheres(LEAF)
    left = remainder_text(TABLE, POINT, 1000, splits, {splits[0], splits[4]})
    assert ranges(left, [LEAF]) == [(7, 10, 40), (7, 50, 100)]
    assert SnapshotRemainder.parse(left).point == POINT
    assert SnapshotRemainder.parse(left).nbytes == 1000


def test_every_leaf_has_its_own_ranges() -> None:
    splits = [*wheres(LEAF), *wheres(OTHER)]
    left = remainder_text(TABLE, POINT, 1000, splits, set(wheres(LEAF)))
    assert ranges(left, [LEAF, OTHER]) == [(8, 0, 10)]


def test_a_leaf_that_was_read_may_be_replaced_or_go() -> None:
    left = remainder_text(TABLE, POINT, 0, [*wheres(LEAF), *wheres(OTHER)], set(wheres(LEAF)))
    assert ranges(left, [OTHER]) == [(8, 0, 10)]


def test_nothing_left_is_something_else_than_nothing_kept() -> None:
    splits = wheres(LEAF)
    left = remainder_text(TABLE, POINT, 0, splits, set(splits))
    assert left
    assert ranges(left, [LEAF]) == []


def test_an_open_end_stays_open() -> None:
    splits = [blocks.to_text() for blocks, _ in split_blocks(LEAF, 0, None, TARGET)]
    left = remainder_text(TABLE, POINT, 0, splits, set(splits[:-1]))
    assert ranges(left, [LEAF]) == [(7, 90, None)]


def test_what_is_read_whole_is_not_kept() -> None:
    whole = BlockRange("public", "t", is_whole=True).to_text()
    assert not remainder_text(TABLE, POINT, 0, [whole], set())


@pytest.mark.parametrize(
    "leaves",
    [[], [Leaf(7, "public", "t", 71, 100, 0)], [Leaf(7, "public", "t", 70, 0, 0, is_whole=True)]],
    ids=["gone", "another file", "not by blocks"],
)
def test_a_file_that_was_replaced_voids_what_was_kept(leaves: list[Leaf]) -> None:
    left = remainder_text(TABLE, POINT, 0, wheres(LEAF), set())
    with pytest.raises(TableReplacedError):
        SnapshotRemainder.parse(left).splits(TABLE, leaves, TARGET)


def test_the_key_is_kept() -> None:
    text = remainder_text(TABLE, POINT, 0, wheres(LEAF), set())
    assert SnapshotRemainder.parse(text).key == ("id",)

"""Which relations the decoder reports as partitions of a captured table."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.relation import Relation, table_of
from ingestd.model.schema import with_before
from tests.unit.decode import pgoutput

ROOT, LEAF, OTHER, FOREIGN = 5, 6, 7, 8
COLUMNS = [("id", 20, -1, True)]
ROOT_IS, LEAF_IS, OTHER_IS, FOREIGN_IS = (
    pgoutput.relation(oid, f"t{oid}", COLUMNS) for oid in (ROOT, LEAF, OTHER, FOREIGN)
)
TYPE = b"Y" + bytes(8) + b"\0\0"
BEGIN, COMMIT = pgoutput.begin(100, xid=41), pgoutput.commit(100, 110)
NEXT_BEGIN, NEXT_COMMIT = pgoutput.begin(200, xid=42), pgoutput.commit(200, 210)


def insert(oid: int) -> bytes:
    return pgoutput.insert(oid, [b"1"])


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([ROOT_IS, LEAF_IS, insert(ROOT)], [(LEAF, ROOT, 100, 41)]),
        ([TYPE, ROOT_IS, TYPE, LEAF_IS, insert(ROOT), insert(ROOT)], [(LEAF, ROOT, 100, 41)]),
        (
            [ROOT_IS, LEAF_IS, insert(ROOT), COMMIT, NEXT_BEGIN, LEAF_IS, insert(ROOT)],
            [(LEAF, ROOT, 100, 41), (LEAF, ROOT, 200, 42)],
        ),
        ([ROOT_IS, insert(ROOT), OTHER_IS, insert(OTHER)], []),
        ([ROOT_IS, OTHER_IS, FOREIGN_IS, pgoutput.truncate(ROOT, OTHER, FOREIGN)], []),
        ([ROOT_IS, FOREIGN_IS, LEAF_IS, insert(FOREIGN)], []),
    ],
    ids=["partition", "types", "told again", "tables", "truncated together", "not captured"],
)
@pytest.mark.parametrize("pieces", [1, 2, 99])
def test_partitions_are_reported(
    messages: list[bytes], told: list[tuple[int, ...]], pieces: int
) -> None:
    found: list[tuple[int, ...]] = []
    decoder = PgoutputDecoder(
        lambda r: with_before(table_of(r), full=False) if r.oid in {ROOT, OTHER} else None,
        report_partition=partial(take, found),
        hold_bytes=0,
    )
    end = NEXT_COMMIT if NEXT_BEGIN in messages else COMMIT
    whole = [BEGIN, *messages, end]
    size = -(-len(whole) // pieces)
    for at in range(0, len(whole), size):
        decoder.feed(*pgoutput.laid_out(whole[at : at + size]))
    assert found == told


def take(found: list[tuple[int, ...]], partition: Relation, table: int) -> None:
    found.append((partition.oid, table, partition.lsn, partition.xid))


def test_every_cut_tells_the_same() -> None:
    messages = [BEGIN, ROOT_IS, LEAF_IS, insert(ROOT), OTHER_IS, insert(OTHER), COMMIT]
    for cuts in itertools.combinations(range(1, len(messages)), 2):
        found: list[tuple[int, ...]] = []
        decoder = PgoutputDecoder(
            lambda r: with_before(table_of(r), full=False) if r.oid in {ROOT, OTHER} else None,
            report_partition=partial(take, found),
            hold_bytes=0,
        )
        for first, last in itertools.pairwise((0, *cuts, len(messages))):
            decoder.feed(*pgoutput.laid_out(messages[first:last]))
        assert found == [(LEAF, ROOT, 100, 41)], cuts

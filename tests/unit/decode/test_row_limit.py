"""Rows larger than the limit are left out, and their table is reported (I8, I9)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.relation import Relation, table_of
from ingestd.model.schema import Table, TableId, with_before
from tests.unit.decode import pgoutput

LIMIT_BYTES = 1000
BIG, SMALL = 5, 6
COLUMNS = [("id", 20, -1, True), ("body", 25, -1, False)]
RELATIONS = [pgoutput.relation(BIG, "big", COLUMNS), pgoutput.relation(SMALL, "small", COLUMNS)]
LARGE = b"x" * (LIMIT_BYTES + 1)


def whole(relation: Relation) -> Table:
    return with_before(table_of(relation), full=True)


def decoder(*, without_body: bool = False) -> PgoutputDecoder:
    def resolve(relation: Relation) -> Table:
        table = whole(relation)
        return replace(table, columns=table.columns[:1], before=()) if without_body else table

    return PgoutputDecoder(resolve, row_limit_bytes=LIMIT_BYTES)


@pytest.mark.parametrize(
    "change",
    [
        pgoutput.insert(BIG, [b"2", LARGE]),
        pgoutput.update(BIG, [b"2", LARGE]),
        pgoutput.update(BIG, [b"2", None], [b"1", LARGE], "O"),
        pgoutput.delete(BIG, [b"2", LARGE], "O"),
    ],
    ids=["insert", "update", "update of it", "delete of it"],
)
def test_isolated_a_row_too_large_is_left_out_and_reported_once(change: bytes) -> None:
    messages = [
        *(pgoutput.begin(100), *RELATIONS),
        *(pgoutput.insert(SMALL, [b"1", b"a"]), change, pgoutput.insert(BIG, [b"3", b"b"])),
        *(change, pgoutput.insert(SMALL, [b"4", b"c"]), pgoutput.commit(100, 110)),
    ]
    [chunk] = decoder().feed(*pgoutput.laid_out(messages))
    [error] = chunk.refused
    assert error.table == TableId("public", "big")
    assert "limits.memory" in str(error)
    assert "exclude_columns" in str(error)
    given = {b.table.id.name: b.rows.column("_cdc_seq").to_pylist() for b in chunk.batches}
    assert given == {"small": [1, 5], "big": [3]}  # its place stays: replays number alike
    assert chunk.position == 110


def test_isolated_a_transaction_of_one_row_too_large_is_passed() -> None:
    messages = [
        *(pgoutput.begin(100), *RELATIONS, pgoutput.insert(BIG, [b"1", LARGE])),
        pgoutput.commit(100, 110),
    ]
    [chunk] = decoder().feed(*pgoutput.laid_out(messages))
    assert len(chunk.refused) == 1
    assert chunk.batches == ()
    assert chunk.position == 110


def test_what_is_not_captured_of_a_row_does_not_count() -> None:
    messages = [
        *(pgoutput.begin(100), *RELATIONS, pgoutput.insert(BIG, [b"1", LARGE])),
        *(pgoutput.update(BIG, [b"1", pgoutput.UNCHANGED]), pgoutput.commit(100, 110)),
    ]
    [chunk] = decoder(without_body=True).feed(*pgoutput.laid_out(messages))
    assert chunk.refused == ()
    [batch] = chunk.batches
    assert batch.rows.column("id").to_pylist() == [1, 1]


def test_the_limit_is_for_a_row_not_for_many() -> None:
    row = b"x" * (LIMIT_BYTES - 20)
    rows = [pgoutput.insert(BIG, [str(n).encode(), row]) for n in range(10)]
    messages = [pgoutput.begin(100), *RELATIONS, *rows, pgoutput.commit(100, 110)]
    [chunk] = decoder().feed(*pgoutput.laid_out(messages))
    assert chunk.refused == ()
    assert chunk.batches[0].rows.num_rows == 10

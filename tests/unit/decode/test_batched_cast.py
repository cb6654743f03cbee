"""Small tables are decoded together: not all at once, and what each has of it is its own."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from ingestd.decode.pgoutput.changes import change_batches
from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.messages import Messages, Transactions
from ingestd.decode.pgoutput.relation import table_of
from ingestd.model.changes import Chunk, TableBatch
from ingestd.model.schema import with_before
from tests.unit.decode import pgoutput

TABLES, ROWS = 50, 40
INT8, TEXT, NUMERIC = 20, 25, 1700
TWO_PLACES = (12 << 16 | 2) + 4
COLUMNS = [
    ("id", INT8, -1, True),
    ("number", INT8, -1, False),
    ("amount", NUMERIC, TWO_PLACES, False),
    ("note", TEXT, -1, False),
]


def decode() -> Chunk:
    oids = range(1, TABLES + 1)
    messages = [pgoutput.begin(100), *(pgoutput.relation(n, f"t{n}", COLUMNS) for n in oids)]
    late: list[bytes] = []  # of the tables that come first in what is decoded
    for row in range(ROWS):
        note = b"a note that takes some room, %d" % row
        values = [b"%d" % row, b"%d" % -row, b"%d.25" % row, note]
        messages += [pgoutput.insert(n, values) for n in oids[2:]]
        late += [pgoutput.insert(n, values) for n in oids[:2]]
    messages += [*reversed(late), pgoutput.commit(100, 108)]
    decoder = PgoutputDecoder(lambda relation: with_before(table_of(relation), full=False))
    [chunk] = decoder.feed(*pgoutput.laid_out(messages))
    return chunk


@pytest.mark.parametrize(
    ("limit", "of_table"), [("JOINT_VALUES", ROWS * len(COLUMNS)), ("JOINT_BYTES", ROWS * 60)]
)
def test_so_much_is_decoded_at_a_time(limit: str, of_table: int) -> None:
    """Its peak memory is many times its size (I9)."""
    at_a_time: list[int] = []

    def decoded(
        messages: Messages, transactions: Transactions, first_seq: Any, group: Any
    ) -> list[TableBatch]:
        at_a_time.append(len(group))
        return change_batches(messages, transactions, first_seq, group)

    with (
        mock.patch("ingestd.decode.pgoutput.decoder.change_batches", decoded),
        mock.patch(f"ingestd.decode.pgoutput.decoder.{limit}", 7 * of_table),
    ):
        chunk = decode()
    assert [batch.table.id.name for batch in chunk.batches] == [
        f"t{oid}" for oid in range(1, TABLES + 1)
    ]
    assert sum(at_a_time) == TABLES
    assert max(at_a_time) <= 7


def test_together_they_are_what_they_are_alone() -> None:
    """Their rows lie between each other's, and not in the order of the tables."""
    with mock.patch("ingestd.decode.pgoutput.decoder.SMALL_ROWS", 0):
        alone = decode()
    together = decode()
    assert len(alone.batches) == len(together.batches) == TABLES
    for one, other in zip(alone.batches, together.batches, strict=True):
        assert one.rows.equals(other.rows, check_metadata=True)


def test_a_table_does_not_keep_the_values_of_others() -> None:
    """Its pending values are counted separately (I9)."""
    chunk = decode()
    assert len(chunk.batches) == TABLES
    for batch in chunk.batches:
        for name in ("id", "number", "note"):
            column: pa.Array = batch.rows.column(name)
            assert column.get_total_buffer_size() < 2 * column.nbytes + 64

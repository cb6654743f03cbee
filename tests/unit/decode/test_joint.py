"""Small tables are decoded together: not all at once, and what each has of it is its own."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pyarrow as pa

from ingestd.changes import Chunk, TableBatch
from ingestd.decode.changerows import change_batches
from ingestd.decode.messages import Messages, Transactions
from ingestd.decode.relation import table_of
from ingestd.decode.stream import StreamDecoder
from ingestd.schema import with_before
from tests.unit.decode import pgoutput

TABLES, ROWS = 50, 40
INT8, TEXT = 20, 25
COLUMNS = [("id", INT8, -1, True), ("number", INT8, -1, False), ("note", TEXT, -1, False)]


def decode() -> Chunk:
    oids = range(1, TABLES + 1)
    messages = [pgoutput.begin(100), *(pgoutput.relation(n, f"t{n}", COLUMNS) for n in oids)]
    for row in range(ROWS):
        values = [b"%d" % row, b"%d" % -row, b"a note that takes some room, %d" % row]
        messages += [pgoutput.insert(n, values) for n in oids]
    messages.append(pgoutput.commit(100, 108))
    decoder = StreamDecoder(lambda relation: with_before(table_of(relation), full=False))
    [chunk] = decoder.feed(*pgoutput.laid_out(messages))
    return chunk


def test_so_many_values_are_decoded_at_a_time() -> None:
    """What they take meanwhile is many times what they are (I9)."""
    at_a_time: list[int] = []

    def decoded(messages: Messages, transactions: Transactions, group: Any) -> list[TableBatch]:
        at_a_time.append(sum(len(changes.messages) for changes in group) * len(COLUMNS))
        return change_batches(messages, transactions, group)

    table = ROWS * len(COLUMNS)
    with (
        mock.patch("ingestd.decode.stream.change_batches", decoded),
        mock.patch("ingestd.decode.stream.JOINT_VALUES", 7 * table),
    ):
        chunk = decode()
    assert [batch.table.id.name for batch in chunk.batches] == [
        f"t{oid}" for oid in range(1, TABLES + 1)
    ]
    assert sum(at_a_time) == TABLES * table
    assert max(at_a_time) == 7 * table


def test_a_table_does_not_keep_the_values_of_others() -> None:
    """What is waiting of it is counted by its own (I9)."""
    chunk = decode()
    assert len(chunk.batches) == TABLES
    for batch in chunk.batches:
        for name in ("id", "number", "note"):
            column: pa.Array = batch.rows.column(name)
            assert column.get_total_buffer_size() < 2 * column.nbytes + 64

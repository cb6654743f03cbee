"""Columns of small tables that are cast together: what each has of it is its own."""

from __future__ import annotations

import pyarrow as pa

from ingestd.decode.relation import table_of
from ingestd.decode.stream import StreamDecoder
from ingestd.schema import with_before
from tests.unit.decode import pgoutput

TABLES, ROWS = 50, 40
INT8, TEXT = 20, 25


def test_a_table_does_not_keep_the_values_of_others() -> None:
    """What is waiting of it is counted by its own (I9)."""
    messages = [pgoutput.begin(100)]
    for oid in range(1, TABLES + 1):
        columns = [("id", INT8, -1, True), ("number", INT8, -1, False), ("note", TEXT, -1, False)]
        messages.append(pgoutput.relation(oid, f"t{oid}", columns))
    for row in range(ROWS):
        values = [b"%d" % row, b"%d" % -row, b"a note that takes some room, %d" % row]
        messages += [pgoutput.insert(oid, values) for oid in range(1, TABLES + 1)]
    messages.append(pgoutput.commit(100, 108))
    decoder = StreamDecoder(lambda relation: with_before(table_of(relation), full=False))
    [chunk] = decoder.feed(*pgoutput.laid_out(messages))
    assert len(chunk.batches) == TABLES
    for batch in chunk.batches:
        for name in ("id", "number", "note"):
            column: pa.Array = batch.rows.column(name)
            assert column.get_total_buffer_size() < 2 * column.nbytes + 64

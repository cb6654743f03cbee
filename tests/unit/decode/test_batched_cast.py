"""Small tables are decoded together: not all at once, and what each has of it is its own."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from ingestd.decode.pgoutput.changes import TableChanges
from ingestd.decode.pgoutput.decoder import GROUPS, GroupPolicy, PgoutputDecoder, table_groups
from ingestd.decode.pgoutput.messages import IS_CHANGE, RELATION, read_messages
from ingestd.decode.pgoutput.relation import Relation, parse_relation, table_of
from ingestd.model.changes import ChangeSet
from ingestd.model.schema import Table, with_before
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


def sent() -> list[bytes]:
    oids = range(1, TABLES + 1)
    messages = [pgoutput.begin(100), *(pgoutput.relation(n, f"t{n}", COLUMNS) for n in oids)]
    late: list[bytes] = []  # of the tables that come first in what is decoded
    for row in range(ROWS):
        note = b"a note that takes some room, %d" % row
        values = [b"%d" % row, b"%d" % -row, b"%d.25" % row, note]
        messages += [pgoutput.insert(n, values) for n in oids[2:]]
        late += [pgoutput.insert(n, values) for n in oids[:2]]
    return [*messages, *reversed(late), pgoutput.commit(100, 108)]


def captured(relation: Relation) -> Table:
    return with_before(table_of(relation), full=False)


def decode(groups: GroupPolicy = GROUPS) -> ChangeSet:
    [change_set] = PgoutputDecoder(captured, groups=groups).feed(*pgoutput.laid_out(sent()))
    return change_set


@pytest.mark.parametrize(
    "groups",
    [GroupPolicy(values=7 * ROWS * len(COLUMNS)), GroupPolicy(nbytes=7 * ROWS * 60)],
    ids=["values", "bytes"],
)
def test_so_much_is_decoded_at_a_time(groups: GroupPolicy) -> None:
    """Its peak memory is many times its size (I9)."""
    messages = read_messages(*pgoutput.laid_out(sent()))
    relations = [
        parse_relation(messages.content(i), None)
        for i in np.flatnonzero(messages.types == RELATION).tolist()
    ]
    is_change = IS_CHANGE[messages.types]
    changes = [
        TableChanges(relation, captured(relation), at, at)
        for relation in relations
        for at in [np.flatnonzero(is_change & (messages.oids == relation.oid))]
    ]
    at_a_time = [len(group) for group in table_groups(messages, changes, groups)]
    assert sum(at_a_time) == TABLES
    assert max(at_a_time) <= 7
    assert [batch.table.id.name for batch in decode(groups).batches] == [
        f"t{oid}" for oid in range(1, TABLES + 1)
    ]


def test_together_they_are_what_they_are_alone() -> None:
    """Their rows lie between each other's, and not in the order of the tables."""
    alone = decode(GroupPolicy(small_rows=0))
    together = decode()
    assert len(alone.batches) == len(together.batches) == TABLES
    for one, other in zip(alone.batches, together.batches, strict=True):
        assert one.rows.equals(other.rows, check_metadata=True)


def test_a_table_does_not_keep_the_values_of_others() -> None:
    """Its pending values are counted separately (I9)."""
    change_set = decode()
    assert len(change_set.batches) == TABLES
    for batch in change_set.batches:
        for name in ("id", "number", "note"):
            column: pa.Array = batch.rows.column(name)
            assert column.get_total_buffer_size() < 2 * column.nbytes + 64

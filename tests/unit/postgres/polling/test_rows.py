from __future__ import annotations

import struct
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ingestd.decode.copy.rows import CopyRows
from ingestd.decode.type_mapping import lake_type
from ingestd.model.changes import TableBatch
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Column, Table, TableId
from ingestd.postgres.polling.polled_table import PolledTable
from ingestd.postgres.polling.rows import FoundRows, PollReadPoint, vanished_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
COLUMNS = [("id", 20, "bigint"), ("note", 25, "text")]
TABLE = Table(
    TableId("public", "t"),
    1,
    tuple(
        Column(n, oid, -1, lake_type(oid, -1), pg_type, identity=n == "id")
        for n, oid, pg_type in COLUMNS
    ),
    key=("id",),
    before=("id",),
)
POLLED = PolledTable(TABLE, None, "gone", 1.0, None)


class Held:
    """Keys that the lake holds."""

    def __init__(self, *keys: int) -> None:
        self._keys = pa.array(keys, pa.int64())

    def contains(self, batch: TableBatch) -> NDArray[np.bool_]:
        ids = batch.rows.column("id").to_numpy()
        found: NDArray[np.bool_] = np.isin(ids, self._keys.to_numpy())
        return found


def looked(rows: Sequence[Sequence[str | None]], next_xid: int = 1000) -> FoundRows:
    """Rows as a poll finds them: id, note, age of xmin, whether they count as deleted, a place."""
    messages = [b"PGCOPY\n\xff\r\n\0" + bytes(8)]
    for row in rows:
        texts = [None if text is None else text.encode() for text in row]
        fields = [
            struct.pack(">i", -1) if text is None else struct.pack(">i", len(text)) + text
            for text in texts
        ]
        messages.append(struct.pack(">h", len(row)) + b"".join(fields))
    messages.append(b"\xff\xff")
    ends = np.cumsum([len(m) for m in messages])
    starts = np.concatenate([[0], ends[:-1]])
    copied = CopyRows("t", len(rows[0])).feed(b"".join(messages), starts, ends)
    assert copied is not None
    return FoundRows.from_copy(POLLED, copied, next_xid)


def changes(found: FoundRows, keys: Held | None, place: PollReadPoint | None = None) -> list[Any]:
    batches = found.changes(place or PollReadPoint(Lsn(77), AT), keys)
    return [row for batch in batches for row in batch.rows.to_pylist()]


def ops(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(row["_cdc_op"], row["id"]) for row in rows]


ROWS = [
    ("1", "a", "3", "false"),
    ("2", None, "4", "false"),
    ("3", "c", "5", "true"),
    ("4", "d", "6", "true"),
]


def test_what_a_row_is_follows_from_what_the_lake_holds() -> None:
    assert ops(changes(looked(ROWS), Held(2, 4))) == [("c", 1), ("u", 2), ("d", 4)]
    assert ops(changes(looked(ROWS), Held())) == [("c", 1), ("c", 2)]


def test_rows_unknown_to_the_lake_are_updates_and_deletes_kept() -> None:
    assert ops(changes(looked(ROWS), None)) == [("u", 1), ("u", 2), ("d", 3), ("d", 4)]


def test_rows_have_the_polls_position_and_their_transaction() -> None:
    rows = changes(looked(ROWS, next_xid=(1 << 32) + 4), Held(2, 3, 4))
    assert [row["_cdc_seq"] for row in rows] == [1, 2, 3, 4]
    assert {row["_cdc_lsn"] for row in rows} == {77}
    assert {row["_cdc_ts"] for row in rows} == {AT}
    low = (1 << 32) - 1
    assert [row["_cdc_xid"] for row in rows] == [1, 0, low, low - 1]
    assert [row["note"] for row in rows] == ["a", None, None, None]


def test_sequences_continue_across_pages_without_gaps() -> None:
    place = PollReadPoint(Lsn(77), AT)
    first = changes(looked(ROWS), Held(), place)
    second = changes(looked(ROWS[:1]), Held(), place)
    assert [row["_cdc_seq"] for row in first + second] == [1, 2, 3]


def test_ids_of_transactions_count_back_from_the_next_one() -> None:
    found = looked(ROWS, next_xid=(5 << 32) + 2)
    assert found.xids.tolist() == [(5 << 32) + 2 - age for age in (3, 4, 5, 6)]


def test_a_page_tells_the_cursor_of_its_last_row() -> None:
    found = looked([("1", "a", "3", "false", "9"), ("2", "a", "3", "false", "9.5")])
    assert found.last_cursor == "9.5"


def test_vanished_rows_have_their_key_and_nothing_else() -> None:
    gone = pa.RecordBatch.from_pydict(
        {
            "id": pa.array([5, None], pa.int64()),
            "_cdc_raw": pa.array([None, [("id", "1e30")]], pa.map_(pa.string(), pa.string())),
        }
    )
    place = PollReadPoint(Lsn(88), AT, seq=4)
    rows = vanished_rows(TABLE, gone, place).rows.to_pylist(maps_as_pydicts="strict")
    assert ops(rows) == [("d", 5), ("d", None)]
    assert [row["_cdc_seq"] for row in rows] == [4, 5]
    assert {row["_cdc_xid"] for row in rows} == {None}
    assert {row["note"] for row in rows} == {None}
    assert [row["_cdc_raw"] for row in rows] == [None, {"id": "1e30"}]
    assert place.seq == 6

"""Rows that a scan found, converted to change rows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.decode.change_batch import CdcColumns, Tuples, table_batch
from ingestd.decode.copy.rows import CopiedRows, microseconds
from ingestd.decode.values.cast import raw_texts
from ingestd.decode.values.text_column import Field, TextColumn
from ingestd.model.changes import DELETE, INSERT, UPDATE, TableBatch, change_schema
from ingestd.model.errors import ProtocolError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table
from ingestd.postgres.polling.polled_table import PolledTable
from ingestd.postgres.polling.progress import FullXids
from ingestd.postgres.polling.queries import AGE, CURSOR, DELETED

_XIDS = 1 << 32


class HeldKeys(Protocol):
    """The keys that the lake holds."""

    def contains(self, batch: TableBatch) -> NDArray[np.bool_]:
        """Return, for each of these change rows, whether its key is held."""
        ...


@dataclass(slots=True)
class PollReadPoint:
    """Where the rows of one poll go: at `position`, `_cdc_seq` from `seq` on, read at `at`."""

    position: Lsn
    at: datetime
    seq: int = 1

    def next(self, op: str, count: int, xids: FullXids | None) -> CdcColumns:
        """Return the change columns of the next `count` rows."""
        first, self.seq = self.seq, self.seq + count
        return CdcColumns(
            np.full(count, ord(op), np.uint8),
            np.full(count, int(self.position)),
            np.arange(first, first + count),
            xids,
            np.full(count, microseconds(self.at)),
        )


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows of a scan. `xids`: 64-bit ids of the transactions that wrote them."""

    polled: PolledTable
    rows: CopiedRows
    xids: FullXids

    @classmethod
    def from_copy(cls, polled: PolledTable, rows: CopiedRows, next_xid: int) -> FoundRows:
        """Return the rows of a `scan_query`; ages count back from `next_xid`.

        Raises ProtocolError.
        """
        ages = _computed(rows.columns[len(polled.table.columns) + AGE], pa.int32())
        if len(ages) and ages.min() < 0:
            raise _malformed()
        return cls(polled, rows, next_xid - ages.astype(np.int64))

    @property
    def last_cursor(self) -> str:
        """The cursor of the last row of a near scan. Raises ProtocolError."""
        [cursor] = _texts(self._field(CURSOR)[-1:]).to_pylist()
        if cursor is None:
            raise _malformed()
        return str(cursor)

    def changes(self, place: PollReadPoint, keys: HeldKeys | None) -> list[TableBatch]:
        """Return the change rows; `keys` must not have them yet.

        A row is a `c` if its key is not held, and a `u` if it is or that is not known. A row that
        counts as deleted is a `d` with its identity only, if its key may be held. Raises
        ProtocolError.
        """
        deleted = _computed(self._field(DELETED), pa.bool_())
        found = []
        if not deleted.all():
            found += self._written(np.flatnonzero(~deleted), place, keys)
        if deleted.any():
            found += self._deleted(np.flatnonzero(deleted), place, keys)
        return found

    def _written(
        self, which: NDArray[np.int64], place: PollReadPoint, keys: HeldKeys | None
    ) -> list[TableBatch]:
        table = self.polled.table
        places = place.next(UPDATE, len(which), self.xids[which] % _XIDS)
        batch = table_batch(table, places, self._tuples(table, which), None, self._nbytes(which))
        if keys is None:
            return [batch]
        ops = np.where(keys.contains(batch), UPDATE, INSERT)
        rows = _with_ops(batch.rows, pa.array(ops.tolist(), pa.string()))
        return [TableBatch(table, rows, batch.nbytes)]

    def _deleted(
        self, which: NDArray[np.int64], place: PollReadPoint, keys: HeldKeys | None
    ) -> list[TableBatch]:
        table = self.polled.table
        identity = set(table.identity)
        if keys is not None:
            probe = PollReadPoint(place.position, place.at).next(DELETE, len(which), None)
            asked = table_batch(table, probe, self._tuples(table, which, identity), None, 0)
            which = which[keys.contains(asked)]
            if not len(which):
                return []
        places = place.next(DELETE, len(which), self.xids[which] % _XIDS)
        tuples = self._tuples(table, which, identity)
        return [table_batch(table, places, tuples, None, self._nbytes(which))]

    def _tuples(
        self, table: Table, which: NDArray[np.int64], names: set[str] | None = None
    ) -> Tuples:
        return Tuples(
            {
                c.name: Field(texts[which])
                for c, texts in zip(table.columns, self.rows.columns, strict=False)
                if names is None or c.name in names
            }
        )

    def _field(self, number: int) -> TextColumn:
        return self.rows.columns[len(self.polled.table.columns) + number]

    def _nbytes(self, which: NDArray[np.int64]) -> int:
        return self.rows.nbytes * len(which) // max(1, self.rows.count)


def vanished_rows(table: Table, gone: pa.RecordBatch, place: PollReadPoint) -> TableBatch:
    """Return `d` rows for keys that the source no longer has: their columns, and `_cdc_raw`."""
    schema = change_schema(table)
    places = place.next(DELETE, gone.num_rows, None)
    blank = table_batch(table, places, Tuples({}), None, 0).rows
    arrays: list[Any] = []
    for number, name in enumerate(schema.names):
        column = gone.column(name) if name in gone.schema.names else blank.column(number)
        arrays.append(column)
    rows = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return TableBatch(table, rows, gone.nbytes)


def _with_ops(rows: pa.RecordBatch, ops: pa.Array) -> pa.RecordBatch:
    return rows.set_column(rows.schema.get_field_index("_cdc_op"), "_cdc_op", ops)


def _computed(field: TextColumn, to: pa.DataType) -> NDArray[Any]:
    """Return a field that `scan_query` computes and that is never null. Raises ProtocolError."""
    try:
        values = _texts(field).cast(to)
    except pa.ArrowInvalid as error:
        raise _malformed() from error
    if values.null_count:
        raise _malformed()
    found: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return found


def _malformed() -> ProtocolError:
    return ProtocolError("malformed age, deletion mark or cursor")


def _texts(field: TextColumn) -> pa.StringArray:
    return raw_texts(field)

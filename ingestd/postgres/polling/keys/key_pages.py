"""The keys of a table in the source: page by page in an index's order, or some of them.

The server packs a page into one row of a result, as it packs the blocks of a snapshot (see
`ingestd.decode.copy.packing`), so that neither side does more per key than read it. The same
decoder converts them to lake values. The row has additional fields: for each column that is sent as
an array, the text of its last value.

A page is limited by rows and, on the server, by the bytes of its keys. So a result never exceeds
the memory for it, whatever the keys are. A key that is larger than a page gets its own page, and
one that is too large for any is not sent.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from psycopg import AsyncConnection, sql

from ingestd.decode.copy.columnar import ColumnarDecoder
from ingestd.decode.copy.packing import ColumnForm, Packing, fields_of, form_of
from ingestd.decode.values.encodings import Encoding
from ingestd.model.errors import ProtocolError
from ingestd.model.keys import Key
from ingestd.model.lsn import ZERO
from ingestd.model.row_checks import key_limit_bytes, key_too_large
from ingestd.model.schema import Column, Table
from ingestd.postgres.catalog.relation_lock import lock_table
from ingestd.postgres.connection.session import query_bytes, read_bytes_as_they_are, sent_encoding
from ingestd.postgres.polling.keys.key_order import KeyOrder, key_order
from ingestd.postgres.snapshot.key_lookup import KeyedRelation, KeyList, can_be_found
from ingestd.postgres.snapshot.queries import output_of, packable, packable_name, packed
from ingestd.process.clock import utc_now

PAGE_ROWS = 65_536
PAGE_BYTES = 4 << 20
"""The most rows of a page, and bytes of its keys."""
_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
_COUNT = struct.Struct(">h")
_LENGTH = struct.Struct(">i")
_UNPACKED = frozenset({"UTF8", "SQL_ASCII"})
_UUID = 2950
_SHORT_PAGES = 2
"""The limit of a page, as a multiple of its size, where the sizes of values are not summed up."""
_FIXED_BYTES, _UUID_BYTES = 12, 44
"""The most that a value takes in a page, with its length."""


def key_table(table: Table) -> Table:
    """Return the table reduced to its key's columns, in the key's order."""
    columns = tuple(replace(table.column(name), identity=True) for name in table.key)
    return replace(table, columns=columns, replica_identity="d", before=(), row_filter=None)


@dataclass(frozen=True, slots=True)
class PackedKeys:
    """A page as the server sent it: `rows` keys; `last`: the texts of the last key, by column.

    Texts are in `encoding`, None for UTF-8.
    """

    table: Table
    message: bytes
    rows: int
    last: tuple[bytes, ...]
    encoding: Encoding | None = None

    @property
    def nbytes(self) -> int:
        """The size of the message."""
        return len(self.message)

    def decoded(self) -> pa.RecordBatch:
        """Return the keys: the lake's columns, and `_cdc_raw`. Raises ProtocolError."""
        decoder = ColumnarDecoder(
            self.table, ZERO, utc_now(), 1, Packing.MEASURED, encoding=self.encoding
        )
        ends = np.array([len(self.message)], np.int64)
        batch = decoder.feed(self.message, np.zeros(1, np.int64), ends)
        assert batch is not None
        return batch.rows.select([*(c.lake_name for c in self.table.columns), "_cdc_raw"])


class _LongKeysError(Exception):
    """A page is incomplete: it had values that are too long, or too many keys."""


class KeyPages:
    """Reads keys of `table`. Raises psycopg.Error, ProtocolError, TableChangedError.

    Raises TableError for a key that is larger than `key_limit_bytes` allows.
    """

    def __init__(self, table: Table, row_limit_bytes: int) -> None:
        self.table = key_table(table)
        self._key_limit_bytes = key_limit_bytes(row_limit_bytes)
        self.page_bytes = min(PAGE_BYTES, self._key_limit_bytes)
        self._most_rows = min(
            PAGE_ROWS, max(1, self.page_bytes // sum(map(_least_bytes, self.table.columns)))
        )
        self._sized_columns = [
            packable_name(i) for i, c in enumerate(self.table.columns) if not _is_short(c)
        ]
        self._has_long = False
        self._order: KeyOrder | None = None
        self._keyed: KeyedRelation | None = None

    async def pages(
        self, connection: AsyncConnection[Any], among: Sequence[Key] | None = None
    ) -> AsyncGenerator[PackedKeys, None]:
        """Yield all keys, in the transaction of the connection.

        `among`: only those of these keys that exist, as the server compares; see `can_list`.
        """
        if among is not None:
            try:
                found = await self._at_once(connection, among)
            except _LongKeysError:
                pass
            else:
                if found is not None:
                    yield found
                return
        place: tuple[bytes, ...] | None = None
        rows = PAGE_ROWS
        while (page := await self.page(connection, place, rows, among)) is not None:
            yield page
            place, rows = page.last, self.rows_after(page)

    async def _at_once(
        self, connection: AsyncConnection[Any], among: Sequence[Key]
    ) -> PackedKeys | None:
        """Return those of these keys that exist, unordered. Raises _LongKeysError."""
        rows = len(among) + 1
        relation = self._relation(await self._find_relation(connection), among)
        keys = self._keys(relation, [sql.SQL("")], rows)
        page = await self._read_page(connection, self._short(keys, rows), marks_long=True)
        if page is not None and page.rows == rows:  # there may be more of them
            raise _LongKeysError
        return page

    async def page(
        self,
        connection: AsyncConnection[Any],
        place: Sequence[bytes] | None,
        rows: int,
        among: Sequence[Key] | None = None,
    ) -> PackedKeys | None:
        """Return the next keys after `place`, the texts of a key; None after the last.

        At most `rows`, in the transaction of the connection.
        """
        keyed = await self._find_relation(connection)
        if self._order is None:
            self._order = await key_order(connection, self.table, keyed.types)
        places: list[sql.Composable] = [sql.SQL("true")]
        if place is not None:
            values = {
                name: keyed.literal(name, text)
                for name, text in zip(self.table.key, place, strict=True)
            }
            places = self._order.after([values[c.name] for c in self._order.columns])
        rows = min(rows, self._most_rows)
        tails = [
            sql.SQL("WHERE {} ORDER BY {} LIMIT {}").format(each, self._order.ordering, rows)
            for each in places
        ]
        keys = self._keys(self._relation(keyed, among), tails, rows)
        if not self._has_long:
            try:
                return await self._read_page(connection, self._short(keys, rows), marks_long=True)
            except _LongKeysError:
                self._has_long = True
        sized = self._sized(keys)
        page = await self._read_page(connection, self._cut(sized))
        if page is None:
            await self._refuse_larger(connection, sized)
        return page

    def rows_after(self, page: PackedKeys) -> int:
        """Return how many rows the next page may have, after this one: as many as will fit."""
        return max(1, self.page_bytes * page.rows // max(1, page.nbytes))

    async def lock(self, connection: AsyncConnection[Any]) -> None:
        """Lock the table against DDL until the transaction ends: call it before reading."""
        await lock_table(connection, self.table, (await self._find_relation(connection)).blocks)

    async def can_list(self, connection: AsyncConnection[Any]) -> bool:
        """Return whether the server can look up keys by the lake's values."""
        found = await self._find_relation(connection)
        return not found.has_composite and all(map(can_be_found, self.table.columns))

    async def _find_relation(self, connection: AsyncConnection[Any]) -> KeyedRelation:
        if self._keyed is None:
            self._keyed = await KeyedRelation.find(connection, self.table, self.table.key)
        return self._keyed

    def _relation(self, keyed: KeyedRelation, among: Sequence[Key] | None) -> sql.Composable:
        """Return the FROM item: the table, or only the requested keys.

        OFFSET 0 makes the server find these first and sort them afterwards. Otherwise it could scan
        an entire index that has them in order.
        """
        if among is None:
            return keyed.blocks.relation
        listed = KeyList(self.table, keyed, tuple(among))
        return sql.SQL("(SELECT {} FROM {} AS source WHERE {} OFFSET 0)").format(
            self._columns, listed.relation, sql.SQL(" AND ").join(listed.bounds)
        )

    @property
    def _columns(self) -> sql.Composable:
        return sql.SQL(", ").join(map(sql.Identifier, self.table.key))

    def _keys(
        self, relation: sql.Composable, tails: Sequence[sql.Composable], rows: int
    ) -> sql.Composed:
        """Return the query for the union of the SELECTs with these tails, in order."""
        found = sql.SQL(" UNION ALL ").join(
            sql.SQL("(SELECT {} FROM {} AS source {})").format(self._columns, relation, tail)
            for tail in tails
        )
        return sql.SQL("SELECT {} FROM ({}) AS source LIMIT {} OFFSET 0").format(
            packable(self.table), found, rows
        )

    def _short(self, keys: sql.Composed, rows: int) -> sql.Composed:
        """Replace long values with null: that limits a page without summing up sizes."""
        if not self._sized_columns:
            return keys
        most = sql.Literal(_SHORT_PAGES * self.page_bytes // (rows * len(self.table.columns)))
        values = [
            sql.SQL("CASE WHEN pg_catalog.octet_length({0}) <= {1} THEN {0} END AS {0}").format(
                name, most
            )
            if name in self._sized_columns
            else name
            for name in map(packable_name, range(len(self.table.columns)))
        ]
        return sql.SQL("SELECT {} FROM ({}) AS keys").format(sql.SQL(", ").join(values), keys)

    def _sized(self, keys: sql.Composed) -> sql.Composed:
        """Add each key's number, and the bytes so far, without fetching the values."""
        sums = [
            sql.SQL("pg_catalog.sum(pg_catalog.octet_length({})) OVER so_far").format(name)
            for name in self._sized_columns
        ]
        return sql.SQL(
            "SELECT *, {} AS bytes, pg_catalog.row_number() OVER so_far AS number"
            " FROM ({}) AS keys WINDOW so_far AS (ROWS UNBOUNDED PRECEDING)"
        ).format(sql.SQL(" + ").join(sums), keys)

    def _cut(self, sized: sql.Composed) -> sql.Composed:
        """Remove what is beyond a page, and a first key that is too large."""
        return sql.SQL(
            "SELECT * FROM ({}) AS keys WHERE bytes <= {} OR number = 1 AND bytes <= {}"
        ).format(sized, self.page_bytes, self._key_limit_bytes)

    async def _read_page(
        self, connection: AsyncConnection[Any], keys: sql.Composed, *, marks_long: bool = False
    ) -> PackedKeys | None:
        """Return these keys as a page; None if there are none.

        `marks_long`: a null marks a value that is too long, and raises _LongKeysError.
        """
        server = (connection.pgconn.parameter_status(b"server_encoding") or b"").decode()
        encoding = sent_encoding(connection)
        query = sql.SQL(
            "SELECT 0::pg_catalog.int8, {packed}{last}, {has_null} FROM ({keys}) AS rows"
        ).format(
            packed=packed(
                self.table,
                Packing.MEASURED,
                is_converted=encoding is None and server not in _UNPACKED,
            ),
            last=sql.SQL("").join(
                sql.SQL(", {}").format(_last_of_array(i)) for i in self._numbers(ColumnForm.FIXED)
            ),
            has_null=sql.SQL(" OR ").join(
                sql.SQL("pg_catalog.count({}) < pg_catalog.count(*)").format(name)
                for name in self._sized_columns
            )
            if self._sized_columns
            else sql.SQL("false"),
            keys=keys,
        )
        await read_bytes_as_they_are(connection)
        async with connection.cursor(binary=True) as cursor:
            await cursor.execute(query_bytes(connection, query))
            result = cursor.pgresult
            assert result is not None
            *fields, has_null = [result.get_value(0, i) for i in range(result.nfields)]
        await read_bytes_as_they_are(connection, yes=False)
        if has_null == b"\1" and marks_long:
            raise _LongKeysError
        return self._page(fields, encoding)

    async def _refuse_larger(self, connection: AsyncConnection[Any], keys: sql.Composed) -> None:
        """Raise TableError if the first of these keys is too large."""
        query = sql.SQL("SELECT bytes FROM ({}) AS keys WHERE number = 1").format(keys)
        await read_bytes_as_they_are(connection)
        cursor = await connection.execute(query_bytes(connection, query))
        row = await cursor.fetchone()
        await read_bytes_as_they_are(connection, yes=False)
        if row is not None and row[0] > self._key_limit_bytes:
            raise key_too_large(self.table.id, row[0], self._key_limit_bytes)

    def _numbers(self, form: ColumnForm) -> list[int]:
        return [i for i, c in enumerate(self.table.columns) if form_of(c) is form]

    def _page(self, fields: Sequence[bytes | None], encoding: Encoding | None) -> PackedKeys | None:
        fixed = self._numbers(ColumnForm.FIXED)
        if len(fields) != fields_of(self.table, Packing.MEASURED) + len(fixed):
            raise ProtocolError("a page of keys has an unexpected number of fields")
        count = fields[1]
        if count is not None and len(count) != _LENGTH.size:
            raise ProtocolError("a page of keys lacks their number")
        rows = 0 if count is None else _LENGTH.unpack(count)[0]
        if rows == 0:
            return None
        lasts = list(fields[len(fields) - len(fixed) :])
        fields = fields[: len(fields) - len(lasts)]
        at, last = 2, []
        for column in self.table.columns:
            form = form_of(column)
            if form is ColumnForm.FIXED:
                last.append(lasts.pop(0) or b"")
                at += 1
            else:
                last.append(_last_value(fields[at], fields[at + 1], form))
                at += 2
        return PackedKeys(self.table, _copied(fields), rows, tuple(last), encoding)


def _is_short(column: Column) -> bool:
    """Return whether all values of the column are short."""
    return form_of(column) is ColumnForm.FIXED or column.type_oid == _UUID


def _least_bytes(column: Column) -> int:
    """Return the bytes that a value takes in a page; for a long one, beyond its content."""
    return _UUID_BYTES if column.type_oid == _UUID else _FIXED_BYTES


def _last_of_array(number: int) -> sql.Composable:
    """Return the text of the last of a column's values, from the array that is built anyway."""
    array = sql.SQL("pg_catalog.array_agg({})").format(packable_name(number))
    return output_of(sql.SQL("({})[pg_catalog.count(*)]").format(array))


def _last_value(values: bytes | None, lengths: bytes | None, form: ColumnForm) -> bytes:
    if values is None or lengths is None or len(lengths) < _LENGTH.size:
        raise ProtocolError("a page of keys lacks its values")
    (length,) = _LENGTH.unpack(lengths[-_LENGTH.size :])
    if not 0 <= length <= len(values):
        raise ProtocolError("lengths do not fill the values of a page of keys")
    value = values[len(values) - length :]
    return b"\\x" + value.hex().encode() if form is ColumnForm.BYTES else value


def _copied(fields: Sequence[bytes | None]) -> bytes:
    """Return the message of a binary COPY with this result row."""
    parts = [_SIGNATURE, _COUNT.pack(len(fields))]
    for value in fields:
        parts.append(_LENGTH.pack(-1 if value is None else len(value)))
        if value is not None:
            parts.append(value)
    return b"".join(parts)

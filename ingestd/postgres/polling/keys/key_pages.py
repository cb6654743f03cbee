"""The keys of a table in the source: page by page in an index's order, or some of them.

The server packs a page into one row of a result, as it does the blocks of a snapshot (see
`ingestd.decode.copy.packing`), so that neither side does anything for each key but look at it; and
they become lake values by the same decoder. Fields beyond: of each column that comes as an array,
the last value's text.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
from psycopg import AsyncConnection, sql

from ingestd.decode.copy.columnar import ColumnarDecoder
from ingestd.decode.copy.packing import Form, Packing, fields_of, form_of
from ingestd.decode.values.encodings import Encoding
from ingestd.model.errors import ProtocolError
from ingestd.model.keys import Key
from ingestd.model.lsn import ZERO
from ingestd.model.schema import Table
from ingestd.postgres.catalog.relation_lock import lock_relation
from ingestd.postgres.connection.session import query_bytes, read_bytes_as_they_are, sent_encoding
from ingestd.postgres.polling.keys.key_order import KeyOrder, key_order
from ingestd.postgres.snapshot.key_lookup import KeyedRelation, KeyList, can_be_found
from ingestd.postgres.snapshot.queries import output_of, packable, packable_name, packed

PAGE_ROWS = 65_536
PAGE_BYTES = 4 << 20
"""A page has no more rows than so many, and of large keys fewer."""
_LEAST_ROWS = 1000

_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
_COUNT = struct.Struct(">h")
_LENGTH = struct.Struct(">i")
_UNPACKED = frozenset({"UTF8", "SQL_ASCII"})


def key_table(table: Table) -> Table:
    """Give the table cut to its key's columns, in the key's order."""
    columns = tuple(replace(table.column(name), identity=True) for name in table.key)
    return replace(table, columns=columns, replica_identity="d", before=(), row_filter=None)


@dataclass(frozen=True, slots=True)
class PackedKeys:
    """A page as the server sent it: `rows` keys; `last`: the last one's texts, by column.

    Texts are in `encoding`, None for UTF-8.
    """

    table: Table
    message: bytes
    rows: int
    last: tuple[bytes, ...]
    encoding: Encoding | None = None

    @property
    def nbytes(self) -> int:
        """How large it is."""
        return len(self.message)

    def decoded(self) -> pa.RecordBatch:
        """Give the keys: the lake's columns, and `_cdc_raw`. Raises ProtocolError."""
        decoder = ColumnarDecoder(
            self.table, ZERO, datetime.now(UTC), 1, Packing.MEASURED, encoding=self.encoding
        )
        ends = np.array([len(self.message)], np.int64)
        batch = decoder.feed(self.message, np.zeros(1, np.int64), ends)
        assert batch is not None
        return batch.rows.select([*(c.lake_name for c in self.table.columns), "_cdc_raw"])


class KeyPages:
    """Reads keys of `table`. Raises psycopg.Error, ProtocolError, TableChangedError."""

    def __init__(self, table: Table) -> None:
        self.table = key_table(table)
        self._order: KeyOrder | None = None
        self._keyed: KeyedRelation | None = None

    async def pages(self, connection: AsyncConnection[Any]) -> AsyncGenerator[PackedKeys, None]:
        """Give all keys, in the transaction that the connection is in."""
        place: tuple[bytes, ...] | None = None
        rows = PAGE_ROWS
        while (page := await self.page(connection, place, rows)) is not None:
            yield page
            place, rows = page.last, rows_of_next(page)

    async def page(
        self, connection: AsyncConnection[Any], place: Sequence[bytes] | None, rows: int
    ) -> PackedKeys | None:
        """Give the next keys after `place`, the texts of one; None after the last.

        In the transaction that the connection is in.
        """
        keyed = await self._found(connection)
        if self._order is None:
            self._order = await key_order(connection, self.table, keyed.types)
        conditions: list[sql.Composable] = [sql.SQL("true")]
        if place is not None:
            values = {
                name: keyed.literal(name, text)
                for name, text in zip(self.table.key, place, strict=True)
            }
            conditions = self._order.after([values[c.name] for c in self._order.columns])
        ordering = self._order.ordering
        tails = [
            sql.SQL("WHERE {} ORDER BY {} LIMIT {}").format(condition, ordering, rows)
            for condition in conditions
        ]
        return await self._read(connection, tails, rows)

    async def lock(self, connection: AsyncConnection[Any]) -> None:
        """Keep the table from being altered until the transaction ends: before it is read."""
        await lock_relation(connection, self.table.id, (await self._found(connection)).blocks)

    async def can_list(self, connection: AsyncConnection[Any]) -> bool:
        """Whether the server can be asked for some of the keys by the lake's values of them."""
        found = await self._found(connection)
        return not found.has_composite and all(map(can_be_found, self.table.columns))

    async def listed(
        self, connection: AsyncConnection[Any], keys: Sequence[Key]
    ) -> PackedKeys | None:
        """Give those of these keys that are there, as the server compares; None if none is."""
        listed = KeyList(self.table, await self._found(connection), tuple(keys))
        [bounds] = listed.bounds
        return await self._read(connection, [sql.SQL("WHERE {}").format(bounds)])

    async def _found(self, connection: AsyncConnection[Any]) -> KeyedRelation:
        if self._keyed is None:
            self._keyed = await KeyedRelation.find(connection, self.table, self.table.key)
        return self._keyed

    async def _read(
        self,
        connection: AsyncConnection[Any],
        tails: Sequence[sql.Composable],
        limit: int | None = None,
    ) -> PackedKeys | None:
        """Read what the SELECTs with these tails give, one after the other."""
        relation = (await self._found(connection)).blocks.relation
        server = (connection.pgconn.parameter_status(b"server_encoding") or b"").decode()
        encoding = sent_encoding(connection)
        columns = sql.SQL(", ").join(map(sql.Identifier, self.table.key))
        found = sql.SQL(" UNION ALL ").join(
            sql.SQL("(SELECT {} FROM {} AS source {})").format(columns, relation, tail)
            for tail in tails
        )
        query = sql.SQL(
            "SELECT 0::pg_catalog.int8, {packed}{last} FROM (SELECT {packable} FROM"
            " ({found}) AS source LIMIT {limit} OFFSET 0) AS rows"
        ).format(
            packed=packed(
                self.table,
                Packing.MEASURED,
                is_converted=encoding is None and server not in _UNPACKED,
            ),
            last=sql.SQL("").join(
                sql.SQL(", {}").format(_last_of_array(i)) for i in self._numbers(Form.FIXED)
            ),
            packable=packable(self.table),
            found=found,
            limit=limit,
        )
        await read_bytes_as_they_are(connection)
        async with connection.cursor(binary=True) as cursor:
            await cursor.execute(query_bytes(connection, query))
            result = cursor.pgresult
            assert result is not None
            fields = [result.get_value(0, i) for i in range(result.nfields)]
        await read_bytes_as_they_are(connection, yes=False)
        return self._page(fields, encoding)

    def _numbers(self, form: Form) -> list[int]:
        return [i for i, c in enumerate(self.table.columns) if form_of(c) is form]

    def _page(self, fields: Sequence[bytes | None], encoding: Encoding | None) -> PackedKeys | None:
        fixed = self._numbers(Form.FIXED)
        if len(fields) != fields_of(self.table, Packing.MEASURED) + len(fixed):
            raise ProtocolError("a page of keys with another number of fields")
        count = fields[1]
        if count is not None and len(count) != _LENGTH.size:
            raise ProtocolError("a page of keys without their number")
        rows = 0 if count is None else _LENGTH.unpack(count)[0]
        if rows == 0:
            return None
        lasts = list(fields[len(fields) - len(fixed) :])
        fields = fields[: len(fields) - len(lasts)]
        at, last = 2, []
        for column in self.table.columns:
            form = form_of(column)
            if form is Form.FIXED:
                last.append(lasts.pop(0) or b"")
                at += 1
            else:
                last.append(_last_value(fields[at], fields[at + 1], form))
                at += 2
        return PackedKeys(self.table, _copied(fields), rows, tuple(last), encoding)


def rows_of_next(page: PackedKeys) -> int:
    """Give how many rows the next page may have, after this one."""
    fitting = PAGE_BYTES * page.rows // max(1, page.nbytes)
    return max(_LEAST_ROWS, min(PAGE_ROWS, fitting))


def _last_of_array(number: int) -> sql.Composable:
    """Give the text of the last of a column's values: of the array that is there already."""
    array = sql.SQL("pg_catalog.array_agg({})").format(packable_name(number))
    return output_of(sql.SQL("({})[pg_catalog.count(*)]").format(array))


def _last_value(values: bytes | None, lengths: bytes | None, form: Form) -> bytes:
    if values is None or lengths is None or len(lengths) < _LENGTH.size:
        raise ProtocolError("a page of keys without its values")
    (length,) = _LENGTH.unpack(lengths[-_LENGTH.size :])
    if not 0 <= length <= len(values):
        raise ProtocolError("lengths do not fill the values of a page of keys")
    value = values[len(values) - length :]
    return b"\\x" + value.hex().encode() if form is Form.BYTES else value


def _copied(fields: Sequence[bytes | None]) -> bytes:
    """Write a row of a result as the message of a binary COPY."""
    parts = [_SIGNATURE, _COUNT.pack(len(fields))]
    for value in fields:
        parts.append(_LENGTH.pack(-1 if value is None else len(value)))
        if value is not None:
            parts.append(value)
    return b"".join(parts)

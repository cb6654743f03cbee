"""Names with bytes that are invalid in the database's encoding: read unchanged, kept distinct.

A server stores such bytes in names as in values, and refuses to convert them: a catalog query that
meets one such name fails completely. Names in shared catalogs (roles, databases) are in the
encoding of the database in which they were created. Source: PostgreSQL documentation, "Character
Set Support".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, LiteralString

from psycopg import AsyncConnection, AsyncCursor, sql
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Loader

from ingestd.decode.values.encodings import (
    KNOWN,
    Encoding,
    OddName,
    distinct_names,
    encoding_of,
    name_of,
)
from ingestd.postgres.connection.quoting import QuotedStr

TYPE_NAME: LiteralString = """
  CROSS JOIN LATERAL (SELECT pg_catalog.format_type(a.atttypid, a.atttypmod) OFFSET 0) f(qualified)
  CROSS JOIN LATERAL (
    SELECT CASE WHEN f.qualified LIKE 'public.%%'
                 AND pg_catalog.to_regtype(pg_catalog.substr(f.qualified, 8)) IS NULL
                THEN pg_catalog.substr(f.qualified, 8) ELSE f.qualified END) type(name)"""
"""Joins `type.name` to columns `a`: the type for display, with a schema only if that is not
`public`, or if a type of pg_catalog has the same name."""
_TEXTS = ("text", "name", "varchar", "bpchar")
_UNKNOWN_TYPE = 0
_RENAMES = {
    "schema": ("ALTER SCHEMA %I RENAME TO %I", "n.nspname"),
    "table": ("ALTER TABLE %s RENAME TO %I", "c.oid::pg_catalog.regclass"),
    "column": (
        "ALTER TABLE %s RENAME COLUMN %I TO %I",
        "c.oid::pg_catalog.regclass, a.attname",
    ),
}
"""The statement that renames the object, and the expression that fills in the old name."""
_IS_IT = (
    "pg_catalog.convert_to(a.attname::pg_catalog.text, pg_catalog.getdatabaseencoding()) "
    "OPERATOR(pg_catalog.=) "
    "pg_catalog.decode('{}', 'hex')"
)
_RENAMING = (
    "DO $$ BEGIN EXECUTE (SELECT pg_catalog.format('{rename}', {of}, '{new}') "
    "FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid "
    "OPERATOR(pg_catalog.=) c.relnamespace "
    "JOIN pg_catalog.pg_attribute a ON a.attrelid OPERATOR(pg_catalog.=) c.oid "
    "WHERE c.oid OPERATOR(pg_catalog.=) {oid} AND {is_it} LIMIT 1); END $$;"
)


class _NameLoader(Loader):
    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        self._encoding = _client_encoding(self.connection)

    def load(self, data: Buffer) -> str:
        return name_of(bytes(data), self._encoding)


class _NameDumper(QuotedStr):
    def dump(self, obj: str) -> bytes:
        return _encoded(obj, _client_encoding(self.connection))


class _NameCursor(AsyncCursor[Any]):
    async def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if isinstance(query, sql.Composable):
            query = query.as_string(None)
        if isinstance(query, str):
            query = _encoded(query, _client_encoding(self.connection))
        return await super().execute(query, *args, **kwargs)


async def read_names(connection: AsyncConnection[Any]) -> None:
    """Make a connection read the catalog from now on, whatever bytes its names have.

    Not for table rows: in a value nothing would mark such bytes. A name that has them is returned
    as an `OddName`. A character outside the database's encoding is sent as an escaped number.
    """
    name = (connection.pgconn.parameter_status(b"server_encoding") or b"").decode()
    if name == "SQL_ASCII" or encoding_of(name) is not None:
        query = sql.SQL("SET client_encoding TO {}").format(sql.Literal(name))
        await connection.execute(query)
        connection.cursor_factory = _NameCursor
        connection.adapters.register_dumper(str, _NameDumper)
    for type_name in _TEXTS:
        connection.adapters.register_loader(type_name, _NameLoader)
    connection.adapters.register_loader(_UNKNOWN_TYPE, _NameLoader)


def refused_name(
    oid: int, schema: str, table: str, columns: Iterable[str]
) -> tuple[str, str] | None:
    """Return why a name prevents a table from being captured, and SQL that renames it, or None.

    The SQL contains none of the odd bytes, which a client may be unable to send.
    """
    for kind, name in (("schema", schema), ("table", table), *(("column", c) for c in columns)):
        if isinstance(name, OddName):
            what = f"the name of {kind} {name} has bytes invalid in the database's encoding"
            return f"{what}: no query can refer to it", _renaming(kind, oid, name)
    return None


def _renaming(kind: str, oid: int, name: OddName) -> str:
    new = f"{kind}_{oid}"
    rename, of = _RENAMES[kind]
    is_it = _IS_IT.format(name.raw.hex()) if kind == "column" else "true"
    return f"{_RENAMING.format(rename=rename, of=of, new=new, oid=oid, is_it=is_it)}  -- or another"


def name_bytes(column: LiteralString) -> sql.Composed:
    """Return an expression for a column of type name, to pass to `name_from`. Any connection."""
    return sql.SQL(
        "pg_catalog.convert_to(" + column + "::pg_catalog.text, CASE WHEN "
        "pg_catalog.getdatabaseencoding() = ANY({}::pg_catalog.text[]) "
        "THEN pg_catalog.getdatabaseencoding() ELSE 'UTF8' END)"
    ).format(sql.Literal(["SQL_ASCII", *KNOWN]))


def name_from(connection: AsyncConnection[Any], name: bytes) -> str:
    """Return the name selected by `name_bytes`; an `OddName` if it has odd bytes."""
    server = connection.pgconn.parameter_status(b"server_encoding") or b""
    return name_of(name, encoding_of(server.decode()))


def tables_apart(tables: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return schema and name of each of a database's tables, made distinct by `distinct_names`."""
    schemas = {_exactly(schema): schema for schema, _ in tables}
    apart = dict(zip(schemas, distinct_names(list(schemas.values())), strict=True))
    found: dict[int, tuple[str, str]] = {}
    for exactly, schema in apart.items():
        places = [i for i, (of, _) in enumerate(tables) if _exactly(of) == exactly]
        names = distinct_names([tables[i][1] for i in places])
        found |= {i: (schema, name) for i, name in zip(places, names, strict=True)}
    return [found[i] for i in range(len(tables))]


def _exactly(name: str) -> str | bytes:
    return name.raw if isinstance(name, OddName) else name


def odd_names(*names: str) -> list[str]:
    """Return the names that no query can refer to."""
    return [name for name in names if isinstance(name, OddName)]


def _client_encoding(connection: Any) -> Encoding | None:  # noqa: ANN401 - psycopg has two kinds
    if connection is None:
        return None
    status = connection.pgconn.parameter_status(b"client_encoding") or b""
    return encoding_of(status.decode())


def _encoded(text: str, encoding: Encoding | None) -> bytes:
    try:
        return text.encode() if encoding is None else encoding.encode(text)
    except UnicodeEncodeError:
        return text.encode("ascii", "backslashreplace")

"""How a value becomes an SQL literal without a connection.

libpq's `PQescapeString` takes such a value to be in the encoding of the connection that this
process made last, and copies multibyte characters of that encoding as they are. In UTF-8 text the
last byte of a character can begin one of EUC_JP, so a quote after it would not be doubled. Queries
are composed here as UTF-8 and encoded afterwards, so the quote and the backslash are all there is.
Source: PostgreSQL documentation, "Lexical Structure", "PQescapeString".
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql
from psycopg.abc import Buffer
from psycopg.adapt import Dumper
from psycopg.types.array import ListDumper
from psycopg.types.string import StrDumperUnknown

from ingestd.model.printable_text import printable_sql


class _Quoting(Dumper):
    def quote(self, obj: Any) -> Buffer:  # noqa: ANN401 - whatever the dumper is of
        if self.connection is not None or (value := self.dump(obj)) is None:
            return super().quote(obj)
        return quoted(bytes(value))


class QuotedStr(_Quoting, StrDumperUnknown):
    """Dumps texts."""


class _QuotedList(_Quoting, ListDumper):
    """Dumps arrays."""


def printed(query: sql.Composable) -> str:
    """Return SQL for a person to paste: all of it is printable, and names what it names."""
    return printable_sql(query.as_string(None))


def quoted(utf8: bytes) -> bytes:
    """Return this text as an SQL literal, whatever standard_conforming_strings is."""
    doubled = utf8.replace(b"'", b"''")
    if b"\\" not in doubled:
        return b"'" + doubled + b"'"
    return b" E'" + doubled.replace(b"\\", b"\\\\") + b"'"


psycopg.adapters.register_dumper(str, QuotedStr)
psycopg.adapters.register_dumper(list, _QuotedList)

"""Quoting of values as SQL literals without a connection.

libpq's `PQescapeString` assumes the encoding of the connection that this process opened last, and
copies multibyte characters of that encoding unchanged. The last byte of a UTF-8 character can be
the first of one in EUC_JP, so a quote after it would not be doubled. Queries are composed here as
UTF-8 and encoded afterwards, so only quote and backslash need care. Source: PostgreSQL
documentation, "Lexical Structure", "PQescapeString".
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
    def quote(self, obj: Any) -> Buffer:  # noqa: ANN401 - the type varies by dumper
        if self.connection is not None or (value := self.dump(obj)) is None:
            return super().quote(obj)
        return quoted(bytes(value))


class QuotedStr(_Quoting, StrDumperUnknown):
    """Dumps texts."""


class _QuotedList(_Quoting, ListDumper):
    """Dumps arrays."""


def printed(query: sql.Composable) -> str:
    """Return SQL to paste: printable, with names that resolve unambiguously."""
    return printable_sql(query.as_string(None))


def quoted(utf8: bytes) -> bytes:
    """Return a text as an SQL literal, valid with any standard_conforming_strings."""
    doubled = utf8.replace(b"'", b"''")
    if b"\\" not in doubled:
        return b"'" + doubled + b"'"
    return b" E'" + doubled.replace(b"\\", b"\\\\") + b"'"


psycopg.adapters.register_dumper(str, QuotedStr)
psycopg.adapters.register_dumper(list, _QuotedList)

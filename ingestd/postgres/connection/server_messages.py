"""The part of a server error that is safe to log: never a value of a row.

Detail and context quote rows, so only the primary message may be returned. In many errors it quotes
a value, too: conversions, and casts to regclass, regrole, regnamespace and the like, where the
value is a name that does not exist. So an allow-list decides whose text is returned, by SQLSTATE
and the server's source file, which do not depend on the language (`lc_messages`). For all other
errors only SQLSTATE and condition are returned.

Source: PostgreSQL documentation, "PostgreSQL Error Codes", "Error and Notice Message Fields".
"""

from __future__ import annotations

import re

import psycopg
from psycopg.errors import Diagnostic

LIMIT = 2000
"""Maximum number of characters used of a server's text: a hostile server sends megabytes."""

_PLACES = re.compile(r'connection to server (at "[^"]*"(, port \d+)?|on socket "[^"]*") failed: ')
"""libpq's prefix. The address is reported separately."""
_SAFE_CLASSES = frozenset(
    {
        "08",  # connection
        "23",  # constraints: the primary message names them; the detail has the row
        "25",  # state of the transaction
        "28",  # authorization
        "40",  # rollback: deadlock, serialization, recovery conflict
        "53",  # resources
        "54",  # limits: sizes, not values
        "55",  # state of an object: locks, slots
        "57",  # operator intervention
        "XX",  # internal errors, damaged data
    }
)
_SAFE_CODES = frozenset({"42501"})
"""Insufficient privilege."""
_OF_CONNECTING = frozenset({"3D000"})
"""Missing database: safe when a connection is refused, because there is no statement."""
_UNSAFE_CODES = frozenset({"55P04"})
"""Quotes a new value of an enum."""
_SAFE_FILES = frozenset(
    {
        "logical.c",
        "logicalfuncs.c",
        "pg_publication.c",
        "pgoutput.c",
        "publicationcmds.c",
        "slot.c",
        "slotfuncs.c",
        "snapbuild.c",
        "walsender.c",
        "xlog.c",
        "xlogreader.c",
        "xlogutils.c",
        "parse_relation.c",  # names in the text of a statement, not in a value
    }
)
"""The server's source files whose errors quote only what we have sent, whatever the class."""
_TRANSPORTS = frozenset({"dblink.c", "connection.c"})
"""Of dblink and postgres_fdw: another server's message, with its code."""
_INTERNAL = "XX000"
"""The code of `elog` in C, which extensions raise with any text."""
_INTERNAL_FILES = frozenset(
    {
        *("aclchk.c", "bufmgr.c", "catcache.c", "detoast.c", "format_type.c", "genam.c"),
        *("heapam.c", "heaptoast.c", "indexam.c", "inval.c", "lmgr.c", "lock.c", "lsyscache.c"),
        *("mcxt.c", "md.c", "multixact.c", "namespace.c", "postgres.c", "proc.c", "procarray.c"),
        *("proto.c", "relation.c", "relcache.c", "relfilenodemap.c", "relfilenumbermap.c"),
        *("relmapper.c", "reorderbuffer.c", "ruleutils.c", "smgr.c", "snapmgr.c", "stringinfo.c"),
        *("syscache.c", "table.c", "toast_internals.c", "tupdesc.c", "typcache.c", "xact.c"),
    }
)
"""The server's source files whose internal errors contain only OIDs, sizes, files and names."""
_RAISED = frozenset({"38", "39", "P0"})
"""Classes of errors that functions of the database raise with any text."""
_OF_LANGUAGES = "pl"
"""Prefix of procedural languages' source files: their functions may raise any class."""
_UNTOLD = "the server's message may quote a row: see its log"


def server_text(error: BaseException) -> str:
    """Return the server's or libpq's error message, cut to `LIMIT`. It may quote a row."""
    text = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    text = text or str(error)
    return text if len(text) <= LIMIT else f"{text[:LIMIT]}..."


def loggable_message(error: psycopg.Error, *, runs_users_sql: bool = False) -> str:
    """Return an error on one line, without its address and without anything that may quote a row.

    `runs_users_sql`: the statement contains a user's SQL (a condition, a row filter), which can
    raise any error about any value.
    """
    code = error.sqlstate
    if code is not None:
        is_raised = code[:2] in _RAISED
        if is_raised or runs_users_sql or not _is_safe(code, error.diag):
            if is_raised:
                return f"a function raised {code} ({_UNTOLD})"
            return f"{type(error).__name__}, SQLSTATE {code} ({_UNTOLD})"
    text = _PLACES.sub("", server_text(error))
    return "; ".join(part for line in text.splitlines() if (part := line.strip(" -\t")))


def _is_safe(code: str, diag: Diagnostic) -> bool:
    file = diag.source_file or ""
    if code in _OF_CONNECTING:
        return diag.severity is None
    # In a query that a function composes, a value may stand in the place of a name.
    if file.startswith(_OF_LANGUAGES) or diag.internal_query or code in _UNSAFE_CODES:
        return False
    if file in _TRANSPORTS:
        return False
    if code == _INTERNAL and file:
        return file in _INTERNAL_FILES or file in _SAFE_FILES
    return code[:2] in _SAFE_CLASSES or code in _SAFE_CODES or file in _SAFE_FILES

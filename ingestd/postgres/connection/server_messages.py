"""The part of a server error that is safe to log: never a value of a row.

Detail and context quote rows, so only the primary message may be returned. Many errors quote a
value there, too: conversions, and casts to regclass, regrole, regnamespace and the like, for which
the value is a name that does not exist. So there is an allow-list of errors whose text is returned,
by SQLSTATE and by the server's source file, which depend on no language (`lc_messages`). Of all
others only SQLSTATE and condition are.

Source: PostgreSQL documentation, "PostgreSQL Error Codes", "Error and Notice Message Fields".
"""

from __future__ import annotations

import re

import psycopg
from psycopg.errors import Diagnostic

LIMIT = 2000
"""How many characters of a server's text are used: a hostile one sends megabytes."""

_PLACES = re.compile(r'connection to server (at "[^"]*"(, port \d+)?|on socket "[^"]*") failed: ')
"""libpq's, which are told beside."""
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
"""No right."""
_OF_CONNECTING = frozenset({"3D000"})
"""No such database: safe where a connection is refused, as there is no statement."""
_UNSAFE_CODES = frozenset({"55P04"})
"""It quotes a new value of an enum."""
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
"""Of the server: what they raise quotes what we have sent, whatever its class."""
_TRANSPORTS = frozenset({"dblink.c", "connection.c"})
"""Of dblink and postgres_fdw: another server's words, with its code."""
_INTERNAL = "XX000"
"""The code of `elog` in C, whose words extensions choose as well."""
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
"""Of the server: their internal errors tell OIDs, sizes, files and names."""
_RAISED = frozenset({"38", "39", "P0"})
"""Classes of what functions of the database raise, in words of their own."""
_OF_LANGUAGES = "pl"
"""How the source files of procedural languages begin: their functions may raise any class."""
_UNTOLD = "the server's words may be of a row: see its log"


def server_text(error: BaseException) -> str:
    """Return what the server, or libpq, says of an error, cut to `LIMIT`. It may quote a row."""
    text = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    text = text or str(error)
    return text if len(text) <= LIMIT else f"{text[:LIMIT]}..."


def loggable_message(error: psycopg.Error, *, runs_users_sql: bool = False) -> str:
    """Return an error on one line, without where it was, and without what may be of a row.

    `runs_users_sql`: the statement has SQL that someone wrote (a condition, a row filter): it can
    raise any error, about any value.
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
    # A query that a function composes may have a value where a name is.
    if file.startswith(_OF_LANGUAGES) or diag.internal_query or code in _UNSAFE_CODES:
        return False
    if file in _TRANSPORTS:
        return False
    if code == _INTERNAL and file:
        return file in _INTERNAL_FILES or file in _SAFE_FILES
    return code[:2] in _SAFE_CLASSES or code in _SAFE_CODES or file in _SAFE_FILES

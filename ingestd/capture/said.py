"""What a server's error says that may be told: none of it is a value of a row."""

from __future__ import annotations

import re

import psycopg

_PLACES = re.compile(r'connection to server (at "[^"]*"(, port \d+)?|on socket "[^"]*") failed: ')
"""libpq's, which are told beside."""
_OF_A_VALUE = {"22", "HV"}
"""Classes of errors that quote the value that they are about: conversions, foreign data.

In whatever language and quotes (`lc_messages`), so nothing of their words is told.
"""
_WRITTEN_BY_USERS = {"38", "39", "P0"}
"""Classes of what functions of the database raise, in words of their own."""
_UNTOLD = "the server's words may be of a row: see its log"


def said(error: psycopg.Error) -> str:
    """Give an error on one line, without where it was, and without what may be of a row.

    Of a server's error only the primary message: detail and context quote rows.
    """
    kind = (error.sqlstate or "")[:2]
    if kind in _WRITTEN_BY_USERS:
        return f"a function raised {error.sqlstate} ({_UNTOLD})"
    if kind in _OF_A_VALUE:
        return f"{type(error).__name__}, SQLSTATE {error.sqlstate} ({_UNTOLD})"
    text = error.diag.message_primary or str(error)
    return "; ".join(
        part for line in _PLACES.sub("", text).splitlines() if (part := line.strip(" -\t"))
    )

"""The errors of ingestd: one hierarchy, by what happens next.

===================  ================================================================
class                what the daemon does
===================  ================================================================
`TransientError`     backs off 0.5 s to 30 s with jitter and retries
`OperatorError`      stops the source, retries every 60 s: operator action required
`TableError`         stops that one table, continues with the others
`ProtocolError`      as OperatorError: bytes that do not follow the protocol
`ConfigError`        ends the command with exit code 2
===================  ================================================================

Every error says what failed and where, and what to do about it, in one to three lines. None
carries a secret or a row value.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ingestd.model.printable_text import printable, printable_command

if TYPE_CHECKING:
    from ingestd.model.schema import TableId

SIMILAR = 0.6
"""Least similarity of two names, 0 to 1, at which one may be a typo of the other."""


MOST_QUOTED = 4_000
"""Maximum length of a text that quotes a lake's contents."""


def shortened(text: str) -> str:
    """Return a text that quotes a lake's contents, cut to MOST_QUOTED."""
    return text if len(text) <= MOST_QUOTED else f"{text[:MOST_QUOTED]}..."


def resnapshot_command(source: str, *tables: TableId | str) -> str:
    """Return the command that re-reads a source's tables, for a remedy."""
    return printable_command(["ingestd", "snapshot", source, *map(str, tables)])


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return a question for the most similar candidate, with a trailing space; empty if none is.

    `candidates`: only names that would help, not the requested or already configured ones.
    """
    others = sorted({*candidates} - {name})
    near = difflib.get_close_matches(name, others, n=1, cutoff=SIMILAR)
    return f"did you mean {near[0]!r}? " if near else ""


def did_you_mean_table(table: TableId, candidates: Iterable[TableId]) -> str:
    """Return the same question for a table: schema and name must each be similar.

    Otherwise a long common schema would make any two tables look alike.
    """

    def similarity(other: TableId) -> float:
        parts = (table.schema, other.schema), (table.name, other.name)
        return min(difflib.SequenceMatcher(None, a, b).ratio() for a, b in parts)

    found = sorted((-similarity(other), str(other)) for other in candidates if other != table)
    near = next((name for score, name in found if -score >= SIMILAR), None)
    return "" if near is None else f"did you mean {near!r}? "


class IngestdError(Exception):
    """Base of all errors. `what`: cause and place; `remedy`: what to do (SQL or a command)."""

    def __init__(self, what: str, *, remedy: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return self.what if self.remedy is None else f"{self.what}\n  remedy: {self.remedy}"


class TransientError(IngestdError):
    """A fault that passes: connection lost, server restarting, slot still held, throttling.

    `reason` is a short constant word for the metric `ingestd_restarts_total{reason}`.
    """

    def __init__(self, what: str, *, reason: str, remedy: str | None = None) -> None:
        super().__init__(what, remedy=remedy)
        self.reason = reason


class OperatorError(IngestdError):
    """Operator action required: wrong password, missing privilege, wrong setting, disk full."""


class LakeLostError(OperatorError):
    """A source's lake is missing, is another one, or an older copy: nothing is written."""


class FolderError(OperatorError):
    """A lake folder's contents can't be read or written: a fault of the table stored there.

    Its texts quote the folder's contents, which may be of any length and have any characters. A
    remedy is not cut or altered, but replaced: part of a command could do harm.
    """

    def __init__(self, what: str, *, remedy: str | None = None) -> None:
        if remedy is not None and (len(remedy) > MOST_QUOTED or printable(remedy) != remedy):
            remedy = "put the table's folder back from a copy"
        super().__init__(printable(shortened(what)), remedy=remedy)


class DamagedError(FolderError):
    """A data file in the lake is damaged or missing: of one table, so others can be read."""


class TableError(OperatorError):
    """One table can't continue; its source can (I8)."""

    def __init__(self, table: TableId, what: str, *, remedy: str | None = None) -> None:
        super().__init__(f"table {table}: {what}", remedy=remedy)
        self.table = table
        self.reason = what


class TableChangedError(TableError):
    """A table was altered while it was read: it must be re-read as it is now."""


class TableReplacedError(TableChangedError):
    """The table's storage is no longer the one that was read: its partial snapshot is void."""


PROTOCOL_REMEDY = (
    "run `ingestd check` to see which server answers. A proxy in between may alter the data unless"
    " `dsn` has sslmode=verify-full. If it happens again, report this text and the server's version"
)


class ProtocolError(IngestdError):
    """Bytes that violate the protocol. The only error that `ingestd.decode` raises.

    `where`: the origin of the bytes, set by their reader: the decoder does not know it.
    """

    def __init__(self, what: str, *, where: str = "", remedy: str = PROTOCOL_REMEDY) -> None:
        super().__init__(f"{where}: {what}" if where else what, remedy=remedy)
        self.where = where

    def within(self, where: str) -> ProtocolError:
        """Return the error with its origin, unless it already has one."""
        return self if self.where else ProtocolError(self.what, where=where)


class ConfigError(IngestdError):
    """The configuration is wrong; `what` begins with the key's path."""

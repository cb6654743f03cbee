"""The errors of ingestd: one hierarchy, by what happens next.

===================  ================================================================
class                what the supervisor does
===================  ================================================================
`TransientError`     backs off 0.5 s to 30 s with jitter and tries again
`OperatorError`      stops the source, tries again every 60 s: a person must act
`TableError`         stops that one table, goes on with the others
`ProtocolError`      as OperatorError: bytes that do not follow the protocol
`ConfigError`        ends the command with exit code 2
===================  ================================================================

Every error says what failed and where, and what to do about it, in one to three lines; none of
them ever carries a secret or a value of a row.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ingestd.model.printable_text import printable_command

if TYPE_CHECKING:
    from ingestd.model.schema import TableId

SIMILAR = 0.6
"""How similar two names are, 0 to 1, of which one may have been meant by the other."""


def reading_anew(source: str, *tables: TableId | str) -> str:
    """Return the command that has a source's tables re-read, for a remedy."""
    return printable_command(["ingestd", "snapshot", source, *map(str, tables)])


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return a question for the most similar candidate, with a space after it; empty if none is.

    `candidates`: only what would help: not what is asked for, or configured, already.
    """
    others = sorted({*candidates} - {name})
    near = difflib.get_close_matches(name, others, n=1, cutoff=SIMILAR)
    return f"did you mean {near[0]!r}? " if near else ""


def did_you_mean_table(table: TableId, candidates: Iterable[TableId]) -> str:
    """Do so for a table: schema and name must each be similar.

    A long schema would have any two tables in it look alike.
    """

    def similarity(other: TableId) -> float:
        parts = (table.schema, other.schema), (table.name, other.name)
        return min(difflib.SequenceMatcher(None, a, b).ratio() for a, b in parts)

    found = sorted((-similarity(other), str(other)) for other in candidates if other != table)
    near = next((name for score, name in found if -score >= SIMILAR), None)
    return "" if near is None else f"did you mean {near!r}? "


class IngestdError(Exception):
    """Base of all: `what` is the cause and place, `remedy` what to do (SQL or a command)."""

    def __init__(self, what: str, *, remedy: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return self.what if self.remedy is None else f"{self.what}\n  remedy: {self.remedy}"


class TransientError(IngestdError):
    """Passes by itself: connection lost, server restarting, slot still held, storage throttling.

    `reason` is a short constant word for the metric `ingestd_restarts_total{reason}`.
    """

    def __init__(self, what: str, *, reason: str, remedy: str | None = None) -> None:
        super().__init__(what, remedy=remedy)
        self.reason = reason


class OperatorError(IngestdError):
    """Someone must act: wrong password, missing right, wrong setting, disk full, unknown fault."""


class LakeLostError(OperatorError):
    """A source's lake is not there, or is another one, or an older copy: nothing is written."""


class FolderError(OperatorError):
    """What is in one folder of the lake can't be read or written: a fault of the table there."""


class DamagedError(FolderError):
    """A data file in the lake is not whole, or gone: of one table, so others can be read."""


class TableError(OperatorError):
    """One table can't go on; its source can (I8)."""

    def __init__(self, table: TableId, what: str, *, remedy: str | None = None) -> None:
        super().__init__(f"table {table}: {what}", remedy=remedy)
        self.table = table
        self.reason = what


class TableChangedError(TableError):
    """A table was altered while it was read: to be read again, as it is now."""


class TableReplacedError(TableChangedError):
    """Its rows lie elsewhere than what was read of it: what was kept of its snapshot is void."""


PROTOCOL_REMEDY = (
    "run `ingestd check`: it says which server answers. What is between may alter what it sends,"
    " unless `dsn` has sslmode=verify-full. If it happens again, report this text and the server's"
    " version"
)


class ProtocolError(IngestdError):
    """Bytes that are not what the protocol says. The only error that leaves `ingestd.decode`.

    `where` they came from, said by who reads them: what decodes them does not know.
    """

    def __init__(self, what: str, *, where: str = "", remedy: str = PROTOCOL_REMEDY) -> None:
        super().__init__(f"{where}: {what}" if where else what, remedy=remedy)
        self.where = where

    def within(self, where: str) -> ProtocolError:
        """Return it with where it came from, if it does not say so already."""
        return self if self.where else ProtocolError(self.what, where=where)


class ConfigError(IngestdError):
    """The configuration is wrong; `what` begins with the key's path."""

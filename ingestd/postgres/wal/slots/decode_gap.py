"""What the slot can't decode, and which tables are kept out for that.

A row that the server can't output is passed by moving the slot, and all tables are re-read. Who
commits such rows again and again must stop no table that they can't write, nor the source:

    the row is                                     kept out until the process ends
    of one table                                   this table
    of one of several, the first one in an hour,   none: it may be an accident
    at most FORGIVEN_A_DAY
    of one of several, otherwise                   all that the server had sent of its transaction
    possibly of a table that was not sent, because none: the slot passes one an hour, and the source
    a row filter that can fail may have failed     stops for the rest of it
    of one that is kept out: its transaction was   none: there can be no new ones
    open when the slot was moved

The fourth row within a day that can only be of tables of one owner keeps out all tables of this
owner, also those created later, if tables of other owners remain. If none does, its tables are kept
out one by one: all of them would be the whole source.

The role that wrote a row could write all tables of its transaction. An owner answers for the roles
that may write its tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from psycopg import sql

from ingestd.model.errors import TableError
from ingestd.model.lsn import Lsn
from ingestd.model.row_checks import WITHOUT_ITS_VALUE
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.tables import TableRow
from ingestd.postgres.connection.quoting import printed

HOUR_S = 3600.0
DAY_S = 86400.0
AT_ONCE = 6
"""How often in an hour the slot is moved at once; all tables are re-read each time."""
PAUSE_S = 1200.0
"""How long it waits after the last time from then on: eight times in any hour at most."""
FORGIVEN_A_DAY = 4
ROWS_OF_AN_OWNER = 4
"""With this many within a day all tables of the owner are kept out."""
_MOST_DROPPED = 10_000
_MOST_NAMED = 5
_WITHOUT_THE_ROWS = (
    "correct or delete their rows at the source, or exclude the tables of this role (`tables`), and"
    " restart: its tables are then re-read"
)


@dataclass(frozen=True, slots=True)
class RowSuspects:
    """The relations that a row may be of, by OID, with their names in its transaction.

    `is_certain`: all stand for one table, a partitioned one and its partition. `is_complete`: the
    row is of no other.
    """

    names: Mapping[int, TableId]
    is_certain: bool = False
    is_complete: bool = True


@dataclass(slots=True)
class SlotDecodeGap:
    """What the slot can't decode, how often it failed and was renewed, and what is kept out.

    A source has one for as long as the process runs.

    `lacks_publication`: it was created after changes that the slot has yet to send. `undecodable`:
    why the server fails at a row each time. `failed_after`: where the transaction before that row's
    ended. `sent_completely`: by name the OID, see `sent_tables`.
    """

    lacks_publication: bool = False
    undecodable: str = ""
    failed_after: Lsn | None = None
    sent_completely: dict[TableId, int] = field(default_factory=dict)
    monotonic: Callable[[], float] = time.monotonic
    _is_moved: bool = False
    _failed_at: str = ""
    _failures: int = 0
    _renewed_at_s: list[float] = field(default_factory=list)
    _forgiven_at_s: list[float] = field(default_factory=list)
    _kept_out: dict[int | tuple[int, TableId], tuple[str, str]] = field(default_factory=dict)
    _owners: dict[int, int] = field(default_factory=dict)
    _captured_owners: frozenset[int] = frozenset()
    _rows_of_owner_at_s: dict[int, list[float]] = field(default_factory=dict)
    _owners_at_fault: set[int] = field(default_factory=set)

    def why(self, publication: str) -> str | None:
        """Return why the slot lacks changes; None if it lacks none."""
        if self.lacks_publication:
            return (
                f"publication {publication!r} was dropped and re-created, or created after the "
                "slot: the server can't send the changes before that"
            )
        return self.undecodable or None

    def fail(self, at: str, after: Lsn) -> int:
        """Record where decoding failed; return how often it has failed there in a row."""
        self._failures = self._failures + 1 if at == self._failed_at else 1
        self._failed_at, self.failed_after = at, after
        return self._failures

    def wait_s(self, suspects: RowSuspects) -> float:
        """Return in how many seconds the slot may pass a row of one of `suspects`.

        The publication may still send a table that is kept out, if it can't be altered. A slot that
        was moved does so for transactions that were open.
        """
        lately = self._since(self._renewed_at_s, HOUR_S)
        if not lately:
            return 0.0
        since_s = self.monotonic() - lately[-1]
        if not self.can_keep_out(suspects):
            return HOUR_S - since_s
        return 0.0 if len(lately) < AT_ONCE else max(0.0, PAUSE_S - since_s)

    def can_keep_out(self, suspects: RowSuspects) -> bool:
        """Return whether no more such rows arrive once `suspects` are kept out."""
        return suspects.is_complete and (self._is_moved or not self._are_kept_out(suspects))

    def keep_out(self, suspects: RowSuspects, why: str) -> None:
        """Keep tables out because of a row of one of `suspects` that the slot is about to pass."""
        is_first = not self._since(self._renewed_at_s, HOUR_S)
        if not suspects.is_certain:
            if not suspects.is_complete or self._are_kept_out(suspects):
                return
            self._forgiven_at_s = self._since(self._forgiven_at_s, DAY_S)
            if is_first and len(self._forgiven_at_s) < FORGIVEN_A_DAY:
                self._forgiven_at_s.append(self.monotonic())
                return
        is_news = not suspects.names.keys() <= self._kept_out.keys()
        for oid, name in suspects.names.items():
            reason = _of_the_row(why) if suspects.is_certain else _of_both(suspects, name, why)
            self._kept_out[oid] = reason
            if (owner := self._owners.get(oid)) is not None:
                self._kept_out[owner, name] = reason
        if is_news:
            self._count_for_owner(suspects)

    def table_error(self, row: TableRow) -> TableError | None:
        """Return why this table is kept out; None if it is not.

        Also one that its owner created in the place of such a table.
        """
        found = self._kept_out.get(row.oid) or self._kept_out.get((row.owner, row.id))
        if found is not None:
            what, remedy = found
            return TableError(row.id, what, remedy=remedy)
        if row.owner in self._kept_out_owners:
            role = printed(sql.Identifier(row.owner_name))
            what = (
                f"{ROWS_OF_AN_OWNER} changes of tables of its owner, role {role}, could not be sent"
                " within a day, so none of its tables is captured"
            )
            return TableError(row.id, what, remedy=_WITHOUT_THE_ROWS)
        return None

    def note_owners(self, rows: Iterable[TableRow]) -> None:
        """Record the owners of the tables that the config selects."""
        owners = {row.oid: row.owner for row in rows}
        dropped = [oid for oid in self._owners if oid not in owners][-_MOST_DROPPED:]
        self._owners = {oid: self._owners[oid] for oid in dropped} | owners
        self._captured_owners = frozenset(owners.values())

    def renewed(self, *, is_moved: bool = False) -> None:
        """Record that the slot was replaced by a new one, or moved past the row."""
        self._is_moved = is_moved
        if self.undecodable:
            lately = self._since(self._renewed_at_s, HOUR_S)
            self._renewed_at_s = [*lately, self.monotonic()]
        self.lacks_publication, self.undecodable, self._failed_at = False, "", ""
        self.failed_after = None

    def _count_for_owner(self, suspects: RowSuspects) -> None:
        owners = {self._owners.get(oid) for oid in suspects.names}
        if suspects.is_certain:  # a partition is not captured itself
            owners.discard(None)
        if len(owners) != 1 or (owner := owners.pop()) is None:
            return
        times_s = self._since(self._rows_of_owner_at_s.get(owner, []), DAY_S)
        self._rows_of_owner_at_s[owner] = times_s = [*times_s, self.monotonic()]
        if len(times_s) >= ROWS_OF_AN_OWNER:
            self._owners_at_fault.add(owner)

    def _are_kept_out(self, suspects: RowSuspects) -> bool:
        return any(
            oid in self._kept_out or self._owners.get(oid) in self._kept_out_owners
            for oid in suspects.names
        )

    @property
    def _kept_out_owners(self) -> set[int]:
        return self._owners_at_fault if self._captured_owners - self._owners_at_fault else set()

    def _since(self, times_s: list[float], period_s: float) -> list[float]:
        since_s = self.monotonic() - period_s
        return [at_s for at_s in times_s if at_s > since_s]


def _of_the_row(why: str) -> tuple[str, str]:
    return f"one of its changes can't be sent: {why}", WITHOUT_ITS_VALUE


def _of_both(suspects: RowSuspects, table: TableId, why: str) -> tuple[str, str]:
    """Return why a table is kept out whose row it need not have been, and the remedy."""
    others = sorted(str(name) for name in suspects.names.values() if name != table)
    more = len(others) - _MOST_NAMED
    named = ", ".join(others[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    what = (
        f"it was written in one transaction with {named}, and a change of one of these tables can't"
        f" be sent: {why}"
    )
    revoke = sql.SQL("REVOKE INSERT, UPDATE, DELETE, TRUNCATE ON {} FROM").format(
        sql.Identifier(table.schema, table.name)
    )
    remedy = (
        "find the role that wrote them; if it must not write this one, "
        f"{printed(revoke)} <role>; and restart: the table is then re-read"
    )
    return what, remedy

"""The result of one poll, and its change sets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ingestd.decode.copy.rows import microseconds
from ingestd.model.changes import NO_COMMITS, ChangeSet, TableBatch
from ingestd.model.lsn import Lsn
from ingestd.postgres.connection.liveness import LivenessCheckedConnection
from ingestd.postgres.polling.poll import PollPoint, TablePoll
from ingestd.postgres.polling.position_clock import Positions
from ingestd.postgres.polling.rows import PollReadPoint
from ingestd.postgres.polling.table_state import PolledState


@dataclass(slots=True)
class TablePollResult:
    """The result of a poll for one table: rows at their own position.

    So positions of one `_cdc_lsn` have no gaps even after a kill between two tables' commits.
    `is_due`: the table is scanned; otherwise only keys that a sweep did not find are looked up.
    """

    state: PolledState
    scan: TablePoll
    read_point: PollReadPoint
    is_due: bool = True
    batches: list[TableBatch] = field(default_factory=list)
    whole_s: float | None = None
    deleted: bool = False


class PollResult:
    """One poll and its results; `waiting`: changes of tables that were polled, not yielded yet."""

    def __init__(
        self, connection: LivenessCheckedConnection, now: PollPoint, positions: Positions
    ) -> None:
        self.connection = connection
        self.now = now
        self._positions = positions
        self._first: Lsn | None = None
        self._transactions = 0
        self.waiting: list[TableBatch] = []
        self.outcomes: list[TablePollResult] = []

    @property
    def has_found(self) -> bool:
        """True if there are rows to yield."""
        return self._first is not None

    def next_read_point(self) -> PollReadPoint:
        """Return the read point of a table's rows; it is given back if there are none."""
        return PollReadPoint(self._positions.next_position(self.now.lsn), self.now.at)

    def complete_table(self, outcome: TablePollResult, *, swept_at: float) -> None:
        """Record the result of a table; its last rows carry the progress."""
        if outcome.batches:
            progress = replace(
                outcome.scan.progress, swept_at=swept_at, key_partition=outcome.state.key_partition
            )
            outcome.batches[-1] = replace(outcome.batches[-1], resume=progress.to_text())
            self._begins_at(outcome.read_point.position)
            self._transactions += 1
        else:
            self._positions.release_position(outcome.read_point.position)
        self.waiting += outcome.batches
        self.outcomes.append(outcome)

    def abandon_table(self, outcome: TablePollResult, *, is_given: bool) -> None:
        """Record that a table yields nothing more."""
        if is_given:
            self._transactions += 1
        else:
            self._positions.release_position(outcome.read_point.position)

    def _begins_at(self, position: Lsn) -> Lsn:
        if self._first is None:
            self._first = position
        return self._first

    def open_change_set(self, outcome: TablePollResult) -> ChangeSet:
        """Return the waiting batches, and those of a table that will yield more."""
        batches, self.waiting = (*self.waiting, *outcome.batches), []
        nbytes, first = sum(b.nbytes for b in batches), self._begins_at(outcome.read_point.position)
        return ChangeSet(
            batches,
            first,
            ends_in_transaction=True,
            first_lsn=first,
            commit_times=NO_COMMITS,
            nbytes=nbytes,
        )

    def last_change_set(self) -> ChangeSet | None:
        """Return the rest of the poll; None if it found nothing."""
        if self._first is None:
            self._positions.pass_by(self.now.lsn)
            return None
        return ChangeSet(
            tuple(self.waiting),
            self._positions.end,
            ends_in_transaction=False,
            first_lsn=self._first,
            commit_times=np.full(self._transactions, microseconds(self.now.at), np.int64),
            nbytes=sum(b.nbytes for b in self.waiting),
        )

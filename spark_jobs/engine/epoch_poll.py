"""Looks for new epochs: the rows of `_epochs` above the newest cut, each once and in order.

Positions are kept in the tables' own commits and in the log of cuts, and nowhere else. So a look
needs no state from an earlier run. What `_epochs` must still be, each look checks::

    its id is that of the lake that the target is of       else: another lake took its place
    it has the epoch of the newest cut, ending where       else: rows were removed or changed, or
        that cut ends                                            an older copy was continued
    the epochs above that follow without a gap             else: rows were removed

Each fault ends the job before a table moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ingestd.model.errors import OperatorError

if TYPE_CHECKING:
    from spark_jobs.engine.cuts import EpochCut
    from spark_jobs.lake.source_lake import Epoch, SourceLake


@dataclass(slots=True)
class EpochPoll:
    """`lake_id`: the id of the `_epochs` that the target is of."""

    lake: SourceLake
    lake_id: str
    _seen: object = field(default=None, init=False)

    def look(self, last: EpochCut | None) -> list[Epoch] | None:
        """Return the epochs from that of the newest cut on; None if none came since the last look.

        Without a cut, those from the first on. Raises OperatorError as described above.
        """
        state = self.lake.require()
        if state.table_id != self.lake_id:
            raise OperatorError(
                f"{self.lake.epochs_path} is of another or earlier lake than it was when this job"
                " started; nothing was skipped",
                remedy="put back the lake, or use a separate --target for the other one",
            )
        if state.mark == self._seen:
            return None
        found = self.lake.epochs(0 if last is None else last.epoch - 1)
        if last is not None:
            self._ensure_continues(last, found)
        self._seen = state.mark
        return found

    def _ensure_continues(self, last: EpochCut, epochs: list[Epoch]) -> None:
        if not epochs:
            raise self.lake.epoch_missing(last.epoch, "the lake ends before it")
        if epochs[0].end_lsn != last.end_lsn:
            raise OperatorError(
                f"{self.lake.epochs_path}: epoch {last.epoch} ends at {epochs[0].end_lsn}, and"
                f" ended at {last.end_lsn} when it was applied; nothing was skipped",
                remedy="restore `_epochs` to the version before, or start over in a new --target",
            )

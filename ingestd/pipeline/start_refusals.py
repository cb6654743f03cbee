"""What keeps a source from starting, as lake and source are found: `run` and `check` ask here.

Decided before anything is changed. `may_read`: lost changes may be made up for by reading all
tables again (`slot_lost`, `snapshot`).
"""

from __future__ import annotations

from ingestd.model.errors import OperatorError
from ingestd.model.lake_state import LakeState
from ingestd.ports import Lost


def refuse_gone(source: str, committed: LakeState, *, may_read: bool) -> None:
    """Raise OperatorError where raw tables are missing and may not be read again."""
    if committed.gone and not may_read:
        names = ", ".join(sorted(map(str, committed.gone)))
        raise OperatorError(
            f"source {source}: raw tables are gone from the lake: {names}",
            remedy='put them back from a copy; or set slot_lost = "resnapshot" and snapshot ='
            ' "initial" to read them anew',
        )


def refuse_lost(source: str, verdict: Lost, *, may_read: bool) -> None:
    """Raise OperatorError where changes may be lost and tables may not be read again.

    Not for a source that is behind the lake: it passes the lake one day, and then nothing else
    tells of the gap, so the loss has to be recorded first.
    """
    if not (may_read or verdict.is_behind):
        raise OperatorError(
            f"source {source}: changes may be lost: {verdict.reason}",
            remedy='set slot_lost = "resnapshot" and snapshot = "initial" to read all tables anew',
        )


def refuse_behind(source: str, verdict: Lost) -> None:
    """Raise OperatorError where the server is at a position below what the lake has."""
    if verdict.is_behind:
        raise OperatorError(f"source {source}: {verdict.reason}", remedy=verdict.remedy)

"""The checks that refuse a start, given the state of lake and source: for `run` and `check`.

They run before anything is changed. `may_read`: lost changes may be repaired by re-reading all
tables (`slot_lost`, `snapshot`).
"""

from __future__ import annotations

from ingestd.model.errors import OperatorError
from ingestd.model.lake_state import LakeState
from ingestd.ports import Lost


def refuse_gone(source: str, committed: LakeState, *, may_read: bool) -> None:
    """Raise OperatorError if raw tables are missing and may not be re-read."""
    if committed.gone and not may_read:
        names = ", ".join(sorted(map(str, committed.gone)))
        raise OperatorError(
            f"source {source}: raw tables are missing from the lake: {names}",
            remedy='restore them from a copy; or set slot_lost = "resnapshot" and snapshot ='
            ' "initial" to re-read them',
        )


def refuse_lost(source: str, verdict: Lost, *, may_read: bool) -> None:
    """Raise OperatorError if changes may be lost and tables may not be re-read.

    Not for a source that is behind the lake: it will pass the lake eventually, and nothing else
    would show the gap then, so the loss must be recorded first.
    """
    if not (may_read or verdict.is_behind):
        raise OperatorError(
            f"source {source}: changes may be lost: {verdict.reason}",
            remedy='set slot_lost = "resnapshot" and snapshot = "initial" to re-read all tables',
        )


def refuse_behind(source: str, verdict: Lost) -> None:
    """Raise OperatorError if the server's position precedes the lake's."""
    if verdict.is_behind:
        raise OperatorError(f"source {source}: {verdict.reason}", remedy=verdict.remedy)

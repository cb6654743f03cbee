"""Decides whether an earlier run of a backfill may be resumed (docs/backfill.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ingestd.model.lake_state import LakeState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.block_range import BlockRange
from spark_jobs.backfills.record import Plan


@dataclass(frozen=True, slots=True)
class BackfillStanding:
    """The present state of the lake, the source and the table.

    `origin`: the source's. `changed`: why the discovery reports the table as changed since it was
    registered, or None. `definition`: the table's `definition_of`. `confirmed`: the slot's
    position. `is_loaded`: files of the plan are committed. `is_complete`: every split has a note
    and its files. `is_at_one_point`: all splits were read at the plan's point. `is_resumable`: the
    remaining splits may be read under a later snapshot.
    """

    table: TableId
    committed: LakeState
    origin: str
    changed: str | None
    definition: str
    confirmed: Lsn | None
    is_loaded: bool
    is_complete: bool
    is_at_one_point: bool
    is_resumable: bool


def why_void(plan: Plan, now: BackfillStanding) -> str | None:  # noqa: PLR0911 - a list of reasons
    """Return why a plan can't be resumed; None if it can."""
    if plan.origin != now.origin:
        return "the source is another server, or on another timeline"
    if now.changed is not None:
        return now.changed
    if plan.definition != now.definition:
        return "the table or its settings have changed"
    if now.confirmed is None or now.confirmed > plan.point:
        return f"the slot does not have the changes since {plan.point}"
    if not _is_untouched(plan, now):
        return "a daemon has written to the lake meanwhile"
    if now.is_loaded:
        return None if now.is_complete else "its notes are incomplete, but files of it are loaded"
    if not (now.is_resumable or (now.is_complete and now.is_at_one_point)):
        return "it can't be read incrementally (no key, a standby, or not by blocks)"
    return None


def _is_untouched(plan: Plan, now: BackfillStanding) -> bool:
    """Return whether only backfills have written since the plan was made."""
    lake = now.committed
    expected = {plan.point, plan.complete_to} if now.is_loaded else {plan.watermark}
    if lake.watermarks.get(now.table) not in expected:
        return False
    if lake.epoch == plan.epoch:
        return lake.position in {plan.position, plan.point}
    return now.is_loaded and (lake.epoch, lake.position) == (plan.epoch + 1, plan.point)


def are_there(left: Iterable[str], present: Iterable[str]) -> bool:
    """Return whether the table still uses the files that these splits are block ranges of.

    `left`: the splits (`Split.where`) still to be read; `present`: the splits that the table would
    be cut into now. A rewritten file has its rows in other blocks, so earlier ranges don't apply.
    """
    files = {(blocks.oid, blocks.file) for blocks in map(BlockRange.parse, present)}
    try:
        return all((b.oid, b.file) in files and b.file for b in map(BlockRange.parse, left))
    except (ValueError, TypeError, RecursionError):  # no range of blocks
        return False

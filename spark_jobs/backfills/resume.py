"""Whether what an earlier run of a backfill left may be gone on with (docs/backfill.md)."""

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
    """How lake, source and table are now.

    `origin`: of the source. `changed`: what the discovery tells of the table since it was
    registered, None if nothing. `definition`: `definition_of` the table. `confirmed`: where the
    slot goes on. `is_loaded`: files of the plan are committed. `is_complete`: all splits have
    notes, and files. `is_at_one_point`: all that were read were read at the plan's point.
    `is_resumable`: the rest may be read under a later snapshot.
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
    """Say why a plan is of no use any more; None if it may be gone on with."""
    if plan.origin != now.origin:
        return "the source is another server, or on another timeline"
    if now.changed is not None:
        return now.changed
    if plan.definition != now.definition:
        return "the table or its settings are not what they were"
    if now.confirmed is None or now.confirmed > plan.point:
        return f"the slot does not have the changes since {plan.point}"
    if not _is_untouched(plan, now):
        return "a daemon has written to the lake meanwhile"
    if now.is_loaded:
        return None if now.is_complete else "what it loaded can't be told any more"
    if not (now.is_resumable or (now.is_complete and now.is_at_one_point)):
        return "it can't be read in parts (no key, a standby, or not by blocks)"
    return None


def _is_untouched(plan: Plan, now: BackfillStanding) -> bool:
    """Return whether nobody but backfills has written since the plan was made."""
    lake = now.committed
    expected = {plan.point, plan.complete_to} if now.is_loaded else {plan.watermark}
    if lake.watermarks.get(now.table) not in expected:
        return False
    if lake.epoch == plan.epoch:
        return lake.position in {plan.position, plan.point}
    return now.is_loaded and (lake.epoch, lake.position) == (plan.epoch + 1, plan.point)


def are_there(left: Iterable[str], present: Iterable[str]) -> bool:
    """Return whether the files that splits (`Split.where`) are ranges of are still the table's.

    `left`: splits that must be read; `present`: those that it would be cut into now. Another file
    has the rows in other blocks than those that were read of the one before.
    """
    files = {(blocks.oid, blocks.file) for blocks in map(BlockRange.parse, present)}
    return all((b.oid, b.file) in files and b.file for b in map(BlockRange.parse, left))

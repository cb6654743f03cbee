"""When the remainder of an earlier backfill is resumed, and when not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ingestd.model.lake_state import LakeState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.ports import Fragment
from ingestd.postgres.catalog.block_range import BlockRange
from spark_jobs.backfills.record import Plan, PlannedSplit
from spark_jobs.backfills.validity import BackfillStanding, are_there, why_void
from tests.unit.lake.rows import AT

TABLE = TableId("public", "a")
P, L = Lsn(100), Lsn(200)
PLAN = Plan(
    run="0001-a",
    definition="as it was",
    origin="7/1",
    epoch=5,
    position=P,
    watermark=None,
    point=L,
    at=AT,
    marker=Fragment("t.parquet", 1, 1, "{}", 0),
    splits=(PlannedSplit("x", 1), PlannedSplit("y", 1)),
)
READ_IN_PARTS = BackfillStanding(
    table=TABLE,
    committed=LakeState(5, P),
    origin="7/1",
    changed=None,
    definition="as it was",
    confirmed=Lsn(90),
    is_loaded=False,
    is_complete=False,
    is_at_one_point=True,
    is_resumable=True,
)
LOADED = replace(
    READ_IN_PARTS,
    committed=LakeState(5, P, {TABLE: L}),
    is_loaded=True,
    is_complete=True,
    is_resumable=False,
)


@pytest.mark.parametrize(
    "now",
    [
        READ_IN_PARTS,
        replace(READ_IN_PARTS, committed=LakeState(5, L)),  # another table of that run was loaded
        replace(READ_IN_PARTS, is_complete=True, is_resumable=False),
        LOADED,
        replace(LOADED, committed=LakeState(5, L, {TABLE: L})),
        replace(LOADED, committed=LakeState(6, L, {TABLE: L})),
        replace(LOADED, is_at_one_point=False),
        replace(LOADED, committed=LakeState(5, P, {TABLE: P})),  # its `t` comes last
    ],
)
def test_a_valid_plan_is_resumed(now: BackfillStanding) -> None:
    assert why_void(PLAN, now) is None


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (replace(READ_IN_PARTS, origin="8/1"), "another server"),
        (replace(READ_IN_PARTS, changed="a column was renamed"), "a column was renamed"),
        (replace(READ_IN_PARTS, definition="other"), "settings have changed"),
        (replace(READ_IN_PARTS, confirmed=Lsn(201)), "does not have the changes since 0/C8"),
        (replace(READ_IN_PARTS, confirmed=None), "does not have the changes"),
        (replace(READ_IN_PARTS, committed=LakeState(6, P)), "a daemon has written"),
        (replace(READ_IN_PARTS, committed=LakeState(5, Lsn(150))), "a daemon has written"),
        (replace(READ_IN_PARTS, committed=LakeState(5, P, {TABLE: Lsn(150)})), "a daemon"),
        (replace(READ_IN_PARTS, is_resumable=False), "incrementally"),
        (
            replace(READ_IN_PARTS, is_resumable=False, is_complete=True, is_at_one_point=False),
            "incrementally",
        ),
        (replace(LOADED, is_complete=False), "notes are incomplete"),
        (replace(LOADED, committed=LakeState(6, Lsn(250), {TABLE: L})), "a daemon"),
        (replace(LOADED, committed=LakeState(6, L, {TABLE: Lsn(250)})), "a daemon"),
        (replace(LOADED, committed=LakeState(7, L, {TABLE: L})), "a daemon"),
    ],
)
def test_a_void_plan_restarts(now: BackfillStanding, why: str) -> None:
    assert why in (why_void(PLAN, now) or "")


def blocks(oid: int, file: int, start: int = 0, end: int | None = None) -> str:
    return BlockRange("public", f"t{oid}", start, end, oid=oid, file=file).to_text()


def test_the_rest_is_read_of_the_same_files_alone() -> None:
    present = [blocks(1, 11, 0, 9), blocks(1, 11, 9), blocks(2, 22)]
    assert are_there([blocks(1, 11, 3, 6), blocks(2, 22)], present)
    assert are_there([blocks(2, 22)], [blocks(1, 99), blocks(2, 22)])  # 1 has been read
    assert not are_there([blocks(1, 11, 3, 6)], [blocks(1, 12)])
    assert not are_there([blocks(3, 33)], present)
    assert not are_there([blocks(1, 0)], [blocks(1, 0)])

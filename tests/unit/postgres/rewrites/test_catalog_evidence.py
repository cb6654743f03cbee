"""What two catalog readings prove (I6): pure, so every combination of marks is cheap to try."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.postgres.rewrites.catalog_evidence import Doubt, Proven, Question, judge
from ingestd.postgres.rewrites.fingerprint import (
    COMPARABLE_XIDS,
    KeyMark,
    StoredColumn,
    TableFingerprint,
    digest,
)

ID = StoredColumn(1, 23, -1, 700, has_missing=False, name=digest("id"))
NOTE = StoredColumn(2, 25, -1, 700, has_missing=False, name=digest("note"))
TABLE, LEAF = 16400, 16410
KEY = KeyMark("d", (1,), 16405, (1,), 16405)
PLAIN = TableFingerprint(
    (ID, NOTE), {TABLE: TABLE}, key=KEY, schema_xid="701", toast={TABLE: 16403}, ended=1000
)
PARTED = replace(PLAIN, files={LEAF: LEAF}, toast={LEAF: 16413}, attach_xids={LEAF: ".702"})
LATER = 5000


def judged(then: TableFingerprint, now: TableFingerprint) -> list[Proven | Doubt]:
    return list(judge(TABLE, then, replace(now, ended=LATER)))


def test_equal_readings_prove_that_nothing_happened() -> None:
    assert not judged(PLAIN, PLAIN)
    assert not judged(PARTED, PARTED)


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("toast", [16403, 16503, 0])
def test_a_table_with_another_file(is_listed: bool, toast: int) -> None:  # noqa: FBT001
    """The stream brings its TRUNCATE. Only a table without an entry can have been UNLOGGED."""
    now = replace(PLAIN, files={TABLE: 16500}, toast={TABLE: toast}, is_listed=is_listed)
    found = judged(PLAIN, now)
    assert bool(found) is (not is_listed and toast != 16403)
    assert all(d == replace_ended(d) for d in found)


def replace_ended(found: Proven | Doubt) -> Doubt:
    assert isinstance(found, Doubt)
    return replace(found, question=Question.HAS_OLDER_ROW, oid=TABLE, ended=1000)


@pytest.mark.parametrize("toast", [16413, 16513, 0])
@pytest.mark.parametrize("since", [COMPARABLE_XIDS - LATER, COMPARABLE_XIDS + LATER])
def test_a_partition_with_another_file_needs_an_older_row(toast: int, since: int) -> None:
    now = replace(PARTED, files={LEAF: 16500}, toast={LEAF: toast})
    [found] = judge(TABLE, PARTED, replace(now, ended=since))
    if since < COMPARABLE_XIDS:
        assert isinstance(found, Doubt)
        assert (found.oid, found.question, found.ended) == (LEAF, Question.HAS_OLDER_ROW, 1000)
    else:
        assert isinstance(found, Proven)
    assert ("ALTER TABLE" in found.reason) is (toast != 16413)


def test_a_first_reading_without_a_horizon_proves_nothing() -> None:
    [found] = judged(replace(PARTED, ended=0), replace(PARTED, files={LEAF: 16500}))
    assert isinstance(found, Proven)


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (replace(KEY, key_by=16406, identity_by=16406), "its key or replica identity changed"),
        (replace(KEY, identity=(2,), replica_identity="i"), "its key or replica identity changed"),
        (replace(KEY, replica_identity="f", identity=()), "its key or replica identity changed"),
        (KeyMark("f"), "its key or replica identity changed"),
        (None, None),
    ],
)
def test_another_key(now: KeyMark | None, reason: str | None) -> None:
    found = judged(PLAIN, replace(PLAIN, key=now))
    assert [f.reason for f in found] == ([] if reason is None else [reason])
    assert not judged(replace(PLAIN, key=None), replace(PLAIN, key=now))  # an older lake's


@pytest.mark.parametrize(("column", "is_news"), [(ID, True), (NOTE, False)])
def test_another_typmod_counts_for_a_key(column: StoredColumn, is_news: bool) -> None:  # noqa: FBT001
    columns = tuple(replace(c, typmod=9) if c is column else c for c in PLAIN.columns)
    found = judged(PLAIN, replace(PLAIN, columns=columns))
    assert bool(found) is is_news


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_table_that_was_in_another_schema(is_listed: bool) -> None:  # noqa: FBT001
    """With an entry in the publication it was published all the time."""
    found = judged(PLAIN, replace(PLAIN, schema_xid="900", is_listed=is_listed))
    assert bool(found) is not is_listed


def test_partitions_that_came_and_went() -> None:
    other = 16420
    came = replace(
        PARTED,
        files={LEAF: LEAF, other: other},
        toast={LEAF: 16413, other: 0},
        attach_xids={LEAF: ".702", other: ".900"},
    )
    [found] = judged(PARTED, came)
    assert isinstance(found, Doubt)
    assert (found.oid, found.question) == (other, Question.CAME_EMPTY)
    assert [f.reason for f in judged(came, PARTED)] == ["a partition was detached or dropped"]
    back = replace(PARTED, attach_xids={LEAF: ".900"})
    assert [f.reason for f in judged(PARTED, back)] == [
        "a partition was detached and attached again"
    ]


@given(
    st.fixed_dictionaries(
        {
            "files": st.sampled_from([{LEAF: LEAF}, {LEAF: 16500}]),
            "attach_xids": st.sampled_from([{LEAF: ".702"}, {LEAF: ".900"}]),
            "toast": st.sampled_from([{LEAF: 16413}, {LEAF: 16513}, {}]),
            "key": st.sampled_from([KEY, replace(KEY, key_by=1), None]),
            "row_filter": st.sampled_from(["", digest("id > 5")]),
            "schema_xid": st.sampled_from(["701", "900", ""]),
            "is_listed": st.booleans(),
            "is_doubted": st.booleans(),
        }
    )
)
def test_what_changes_rows_is_never_overlooked(marks: dict[str, object]) -> None:
    """Whatever else changed: no mark excuses another one."""
    now = replace(PARTED, **marks)  # type: ignore[arg-type]
    reasons = {found.reason for found in judged(replace(PARTED, is_doubted=now.is_doubted), now)}
    assert (now.files != PARTED.files) <= any("a partition was" in r for r in reasons)
    assert (now.attach_xids != PARTED.attach_xids) <= any("attached again" in r for r in reasons)
    assert (now.row_filter != "") <= any("row filter" in r for r in reasons)
    assert (now.key not in {None, KEY}) <= any("key" in r for r in reasons)
    assert now.is_doubted <= any("judged" in r for r in reasons)

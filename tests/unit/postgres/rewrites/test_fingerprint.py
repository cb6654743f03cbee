from __future__ import annotations

from dataclasses import replace

import pytest

from ingestd.postgres.rewrites.catalog_evidence import is_altered, reassigned
from ingestd.postgres.rewrites.fingerprint import KeyMark, StoredColumn, TableFingerprint, digest

ID = StoredColumn(1, 23, -1, 700, has_missing=False, name=digest("id"))
NOTE = StoredColumn(2, 25, -1, 700, has_missing=False, name=digest("note"))
STORED = TableFingerprint((ID, NOTE), {16400: 16400}, digest("id > 5"), membership=17)


def test_what_is_written_is_read() -> None:
    former = replace(STORED, columns=(replace(ID, has_missing=True),)).after(STORED)
    assert former.former == {NOTE.name}
    assert TableFingerprint.parse(str(former)) == former
    assert TableFingerprint.parse(str(STORED)) == STORED
    ended = replace(STORED, ended=1 << 33)
    found = TableFingerprint.parse(str(ended))
    assert found == STORED  # it says when, not how
    assert found is not None
    assert found.ended == 1 << 33
    placed = replace(STORED, attach_xids={16401: ".745", 16402: ".745.750"})
    sent = replace(STORED, publication="745:10")
    for written in (
        placed,
        replace(placed, ended=1 << 33),
        sent,
        replace(placed, publication="1:2"),
        replace(placed, key=KeyMark("f", (1, 2), 16390), schema_xid="745", toast={16401: 16402}),
        replace(placed, empty=frozenset({16401, 16402})),
        replace(sent, key=KeyMark("i", (), 0, (2,), 16391), is_streamed=False, ended=9),
    ):
        assert TableFingerprint.parse(str(written)) == written
    assert TableFingerprint.parse("") is None
    assert TableFingerprint.parse("1:23:-1:744|16489:16489|") is None


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        ((ID, replace(NOTE, name=digest("remark"))), "a column was renamed"),
        ((ID, replace(NOTE, number=3)), "a column was dropped and re-created"),
        ((ID, replace(NOTE, type_oid=1114)), "a column's type changed"),
        ((ID, replace(NOTE, type_oid=1043, typmod=24)), None),
        ((ID, NOTE, StoredColumn(3, 23, -1, 800, has_missing=False, name=digest("x"))), None),
        ((ID,), None),
    ],
)
def test_a_name_or_type_that_means_something_else(
    now: tuple[StoredColumn, ...], reason: str | None
) -> None:
    assert reassigned(STORED, replace(STORED, columns=now)) == reason


def test_a_column_recreated_after_its_drop_was_seen() -> None:
    gone = replace(STORED, columns=(ID,)).after(STORED)
    anew = replace(STORED, columns=(ID, replace(NOTE, number=3))).after(gone)
    assert reassigned(gone, anew) == "a column was dropped and re-created"
    assert anew.former == frozenset()


@pytest.mark.parametrize(
    ("numbered", "number", "dropped", "reason"),
    [
        (2, 4, {3}, "a column was dropped and re-created"),
        (3, 4, {3}, None),  # before the last catalog poll
        (2, 3, {4}, None),  # another one, after it
        (0, 4, {3}, None),  # an older lake does not say
    ],
)
def test_a_column_made_after_one_that_no_look_saw(
    numbered: int, number: int, dropped: set[int], reason: str | None
) -> None:
    then = replace(STORED, numbered=numbered)
    new = StoredColumn(number, 23, -1, 800, has_missing=False, name=digest("x"))
    now = replace(STORED, columns=(ID, NOTE, new), numbered=4, dropped=frozenset(dropped))
    assert reassigned(then, now) == reason
    assert TableFingerprint.parse(str(now)) == now


def test_a_vacuum_full_alters_nothing() -> None:
    then = replace(STORED, columns=(ID, replace(NOTE, has_missing=True)))
    forgotten = replace(then, columns=(ID, replace(NOTE, xmin=900)), files={16400: 16500})
    assert not is_altered(then, forgotten)
    assert is_altered(STORED, forgotten)


def test_a_place_is_worth_recording() -> None:
    then, now = (replace(STORED, attach_xids={16401: place}) for place in (".745", ".746"))
    assert now.differs_durably(then)


def test_other_files_alone_are_not_worth_recording() -> None:
    assert not replace(STORED, files={16400: 16500}).differs_durably(STORED)
    assert replace(STORED, files={16401: 16401}).differs_durably(STORED)
    assert replace(STORED, membership=18).differs_durably(STORED)
    parted = replace(STORED, attach_xids={16400: ".745"})
    assert replace(parted, files={16400: 16500}).differs_durably(parted)


def test_a_horizon_is_recorded_before_ids_wrap_around() -> None:
    then = replace(STORED, ended=1000)
    assert not replace(then, ended=100_000_000).differs_durably(then)
    assert replace(then, ended=1_000_000_000).differs_durably(then)

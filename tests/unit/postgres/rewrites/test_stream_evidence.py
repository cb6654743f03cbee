"""Evidence from the stream, compared with what a catalog poll found (I6, I7)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ingestd.decode.pgoutput.relation import Relation, RelationColumn
from ingestd.model.lsn import Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import TableId
from ingestd.postgres.rewrites.fingerprint import KeyMark, StoredColumn, TableFingerprint, digest
from ingestd.postgres.rewrites.stream_evidence import StreamEvidence

TABLE, LEAF, XID, LSN = 16400, 16410, 800, Lsn(5000)
SEEN, BEFORE = PgSnapshot(810, 810), PgSnapshot(790, 790)
INT, TEXT = 23, 25
RENAMED, RETYPED = "a column was renamed", "a column's type changed"
WENT = "a partition was detached or dropped"


def stored(
    *names: str, leaves: tuple[int, ...] = (), types: tuple[int, ...] = ()
) -> TableFingerprint:
    kinds = types or (INT,) * len(names)
    columns = tuple(
        StoredColumn(number, kind, -1, 700, has_missing=False, name=digest(name))
        for number, (name, kind) in enumerate(zip(names, kinds, strict=True), start=1)
    )
    return TableFingerprint(
        columns, {o: o for o in leaves}, attach_xids=dict.fromkeys(leaves, ".1")
    )


def relation(*names: str, type_oid: int = INT, xid: int = XID, lsn: Lsn = LSN) -> Relation:
    columns = tuple(RelationColumn(n, type_oid, -1, identity=False) for n in names)
    return Relation(TABLE, TableId("public", "t"), "d", columns, lsn, xid)


def leaf(oid: int = LEAF, lsn: Lsn = LSN, xid: int = XID, identity: str = "d id") -> Relation:
    """A RELATION message of a partition, with its replica identity and the columns of that."""
    kind, *names = identity.split()
    columns = tuple(RelationColumn(n, INT, -1, identity=n in names) for n in ("id", "n"))
    return Relation(oid, TableId("public", "leaf"), kind, columns, lsn, xid)  # type: ignore[arg-type]


THEN = stored("id", "n")


@pytest.mark.parametrize(
    ("reported", "now", "reason"),
    [
        (["id n x"], stored("id", "n", "y"), RENAMED),
        (["id n x", "id n y"], stored("id", "n", "y"), RENAMED),
        (["id n x"], stored("id", "n", "x"), None),
        (["id n x", "id n x y"], stored("id", "n", "x", "y"), None),
        (["id n x"], stored("id", "n"), None),
        (["id n"], stored("id", "n", "y"), None),
        (["id n x"], stored("id", "n", "x", types=(INT, INT, TEXT)), RETYPED),
        (["id n x"], stored("id", "n", "y", "x"), RENAMED),
        (["id n x", "id n y x"], stored("id", "n", "y", "x"), RENAMED),
        (["id n x y"], stored("id", "n", "y", "x"), RENAMED),
        (["id n x", "id n x y"], stored("id", "n", "y", "x"), RENAMED),
        (["id x"], stored("id", "n", "x"), RENAMED),
        (["id n x y", "id n x"], stored("id", "n", "x"), None),
    ],
    ids=[
        *(
            "renamed",
            "reported both",
            "added",
            "added both",
            "dropped",
            "reported nothing",
            "retyped",
        ),
        *(
            "name given on",
            "then reported",
            "names swapped",
            "then swapped",
            "old one was",
            "one went",
        ),
    ],
)
def test_i6_a_column_that_no_look_saw(
    reported: list[str], now: TableFingerprint, reason: str | None
) -> None:
    evidence = StreamEvidence()
    for names in reported:
        evidence.record_columns(relation(*names.split()), THEN)
    assert evidence.visible_to(SEEN).difference(TABLE, now.after(THEN)) == reason


def test_i6_unpublished_columns_are_in_no_list() -> None:
    evidence = StreamEvidence()
    evidence.record_columns(relation("id", "x"), THEN)
    now = stored("id", "n", "x")
    assert evidence.visible_to(SEEN).difference(TABLE, now.after(THEN)) == RENAMED
    assert (
        evidence.visible_to(SEEN).difference(TABLE, replace(now, unlisted=frozenset({2}))) is None
    )


def test_i6_a_type_that_only_the_stream_knows() -> None:
    evidence = StreamEvidence()
    evidence.record_columns(relation("id", "n", type_oid=INT), stored("id", "n", types=(INT, TEXT)))
    now = stored("id", "n", types=(INT, TEXT))
    assert evidence.visible_to(SEEN).difference(TABLE, now) == RETYPED


def test_i6_a_column_that_came_and_went_is_a_former_one() -> None:
    evidence = StreamEvidence()
    evidence.record_columns(relation("id", "n", "x"), THEN)
    unseen = evidence.visible_to(SEEN)
    assert unseen.has_news(TABLE, THEN)
    now = unseen.with_streamed_names(TABLE, THEN)
    assert now.former == {digest("x")}
    evidence.clear(unseen, SEEN, {TABLE: now}, [])
    evidence.record_columns(relation("id", "n", "x"), now)  # when the stream is read again
    assert not evidence.visible_to(SEEN).has_news(TABLE, now)


def test_i7_what_a_look_can_not_see_yet_is_judged_later() -> None:
    evidence = StreamEvidence()
    evidence.record_columns(relation("id", "n", "x"), THEN)
    evidence.record_partition(leaf(LEAF, LSN, XID), TABLE, THEN)
    early = evidence.visible_to(BEFORE)
    assert not early.has_news(TABLE, THEN)
    assert early.with_streamed_names(TABLE, THEN) == THEN
    evidence.clear(early, BEFORE, {TABLE: THEN}, [])
    late = evidence.visible_to(SEEN)
    now = stored("id", "n", "x", leaves=(LEAF,)).after(THEN)
    assert late.difference(TABLE, now) is None
    assert late.difference(TABLE, stored("id", "n", "y").after(THEN)) == RENAMED
    assert late.difference(TABLE, stored("id", "n")) == WENT


def test_i6_evidence_during_a_catalog_poll_counts_for_the_next() -> None:
    evidence = StreamEvidence()
    evidence.record_columns(relation("id", "n", "x"), THEN)
    unseen = evidence.visible_to(SEEN)
    evidence.record_columns(relation("id", "n", "z"), THEN)
    evidence.record_partition(leaf(LEAF, LSN, XID), TABLE, THEN)
    now = unseen.with_streamed_names(TABLE, stored("id", "n", "x").after(THEN))
    evidence.clear(unseen, SEEN, {TABLE: now}, [])
    assert evidence.visible_to(SEEN).difference(TABLE, stored("id", "n", "y").after(now)) == RENAMED
    assert evidence.visible_to(SEEN).difference(TABLE, stored("id", "n")) == WENT


def test_i6_evidence_recorded_by_earlier_runs_counts() -> None:
    evidence = StreamEvidence()
    evidence.record_lake_names(TABLE, ["id", "n", "x"], stored("id", "n", "y"))
    unseen = evidence.visible_to(SEEN)
    assert unseen.difference(TABLE, stored("id", "n", "x")) is None
    assert unseen.difference(TABLE, stored("id", "n", "y")) == RENAMED


def test_i7_what_is_void_is_not_judged() -> None:
    evidence = StreamEvidence()
    evidence.clear(evidence.visible_to(SEEN), SEEN, {TABLE: THEN}, [TABLE])
    evidence.record_partition(leaf(LEAF, LSN, XID), TABLE, THEN)
    evidence.record_columns(relation("id", "n", "x"), THEN)
    now = stored("id", "n", "y").after(THEN)
    assert evidence.visible_to(SEEN).difference(TABLE, now) is None
    assert evidence.visible_to(SEEN).with_streamed_names(TABLE, now).former == {digest("x")}
    assert evidence.record_partition(leaf(LEAF, LSN, 820), TABLE, THEN)  # after that poll


def test_i7_evidence_below_the_snapshot_point_is_not_judged() -> None:
    evidence = StreamEvidence()
    evidence.set_read_positions({TABLE: Lsn(LSN + 1)})
    assert not evidence.record_partition(leaf(LEAF, LSN, XID), TABLE, THEN)
    assert evidence.record_partition(leaf(LEAF, Lsn(LSN + 1), XID), TABLE, THEN)


def test_i6_a_partition_that_no_look_saw() -> None:
    evidence = StreamEvidence()
    evidence.record_partition(leaf(LEAF, LSN, XID), TABLE, THEN)
    evidence.record_partition(leaf(LEAF, LSN, XID), TABLE + 1, THEN)  # where it went then
    now, unseen = stored("id", "n", leaves=(LEAF + 1,)), evidence.visible_to(SEEN)
    assert unseen.difference(TABLE, now) == WENT
    assert unseen.difference(TABLE + 1, stored("id", leaves=(LEAF,))) is None
    evidence.clear(unseen, SEEN, {TABLE: now}, [TABLE])
    evidence.record_partition(leaf(LEAF, LSN, XID), TABLE, THEN)  # when the stream is replayed
    assert not evidence.visible_to(SEEN).has_news(TABLE, now)
    evidence.record_partition(leaf(LEAF, LSN, 820), TABLE, THEN)  # it came and went once more
    assert evidence.visible_to(PgSnapshot(830, 830)).has_news(TABLE, now)


def test_i7_a_partition_that_a_look_saw_is_for_the_looks() -> None:
    evidence, then = StreamEvidence(), stored("id", "n", leaves=(LEAF,))
    evidence.clear(evidence.visible_to(SEEN), SEEN, {TABLE: then}, [])
    assert not evidence.record_partition(leaf(LEAF, LSN, XID), TABLE, THEN)
    gone = replace(then, files={}, attach_xids={})
    assert evidence.visible_to(SEEN).difference(TABLE, gone) is None
    assert not evidence.record_partition(
        leaf(LEAF, LSN, 820), TABLE, THEN
    )  # no reason to poll at once
    assert evidence.visible_to(PgSnapshot(830, 830)).difference(TABLE, gone) == WENT


def test_i6_a_partition_loaded_when_made_counts_until_a_reread() -> None:
    evidence, now = StreamEvidence(), stored("id", "n", leaves=(LEAF,))
    evidence.expect_made(TABLE, {LEAF: XID})
    evidence.clear(evidence.visible_to(SEEN), SEEN, {TABLE: now}, [])
    assert evidence.record_partition(leaf(LEAF, LSN, XID), TABLE, THEN)
    evidence.clear(evidence.visible_to(SEEN), SEEN, {TABLE: now}, [])  # it came during that poll
    assert evidence.loaded_when_made(TABLE) is not None
    evidence.clear(evidence.visible_to(SEEN), SEEN, {TABLE: now}, [TABLE])
    assert evidence.loaded_when_made(TABLE) is None


def test_i6_what_is_settled_of_new_partitions_is_not_kept() -> None:
    evidence, now = StreamEvidence(), stored("id", "n", leaves=(LEAF,))
    evidence.expect_made(TABLE, {LEAF: XID})
    evidence.clear(evidence.visible_to(SEEN), SEEN, {TABLE: now}, [])
    evidence.record_partition(
        leaf(LEAF, LSN, XID + 1), TABLE, THEN
    )  # another transaction was the first
    evidence.record_partition(
        leaf(LEAF + 1, LSN, XID), TABLE + 1, THEN
    )  # of a table that is not captured
    evidence.clear(evidence.visible_to(SEEN), SEEN, {TABLE: now}, [])
    assert not evidence.makers
    assert not evidence.first
    evidence.expect_made(TABLE, {LEAF: XID + 2})
    evidence.record_partition(leaf(LEAF, LSN, XID + 2), TABLE, THEN)
    evidence.clear(evidence.visible_to(SEEN), SEEN, {}, [])  # it can't be captured any more
    assert evidence.loaded_when_made(TABLE) is None


@pytest.mark.parametrize(
    ("root", "sent", "is_reported"),
    [
        ("d:1:7:1:7", "d id", False),
        ("d:1:7:1:7", "i id n", False),
        ("d:1:7:1:7", "f id n", False),
        ("d:1:7:1:7", "n", False),
        ("d:1:7:1:7", "i n", True),
        ("i:1:7:2:8", "d id", True),
        ("i:1:7:2:8", "i n", False),
        ("f:1:7::0", "d id", False),
        ("f:1:7::0", "i n", True),
        ("f::0::0", "d id", True),
        ("f::0::0", "f id n", False),
    ],
)
def test_i6_another_replica_identity_of_a_partition(
    root: str, sent: str, *, is_reported: bool
) -> None:
    evidence = StreamEvidence()
    then = replace(THEN, key=KeyMark.parse(root), files={LEAF: LEAF}, attach_xids={LEAF: ".1"})
    evidence.clear(evidence.visible_to(SEEN), SEEN, {TABLE: then}, [])
    assert evidence.record_partition(leaf(identity=sent), TABLE, then) is is_reported
    assert (evidence.visible_to(SEEN).difference(TABLE, then) is not None) is is_reported
    assert (TABLE in evidence.unjudged()) is is_reported


def test_i6_a_change_while_its_partition_is_found_empty_counts() -> None:
    evidence, then = StreamEvidence(), stored("id", "n", leaves=(LEAF,))
    evidence.clear(evidence.visible_to(SEEN), SEEN, {TABLE: then}, [])
    reported = evidence.visible_to(SEEN)
    evidence.record_partition(leaf(), TABLE, then)
    evidence.expect_quiet(LEAF, TABLE, SEEN)
    evidence.clear(reported, SEEN, {TABLE: then}, [])
    assert evidence.visible_to(SEEN).difference(TABLE, then) == "a partition was truncated directly"

"""Which values may have another text than at the reading of the catalog before."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.model.changes import TableBatch, change_schema
from ingestd.model.lsn import Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import Column, Table, TableId
from ingestd.postgres.rewrites.dependent_texts import (
    NO_TEXTS,
    StaleText,
    TableTexts,
    TypeTexts,
    TypeUse,
    doubts,
)
from ingestd.postgres.rewrites.fingerprint import TableFingerprint
from ingestd.postgres.rewrites.streamed_texts import StreamedTexts

OBJECTS = st.dictionaries(st.integers(1, 300), st.sampled_from("abc"), min_size=1)
USES = (TypeUse("regclass", "value", "v", 2205),)


def read(objects: dict[int, str], type_: str = "regclass") -> TableTexts:
    return TableTexts((TypeTexts.from_catalog(type_, objects),), USES)


def recorded(texts: TableTexts) -> TableTexts:
    """As a later run finds it."""
    return TableTexts.parse(str(texts))


def counts(doubt: StaleText, oid: int) -> bool:
    """Whether a value that refers to this object is in doubt."""
    is_above = doubt.is_above and oid > doubt.last
    in_bucket = oid <= doubt.last and oid % doubt.modulus in doubt.buckets
    return doubt.is_total or oid in doubt.oids or in_bucket or is_above


@given(OBJECTS, OBJECTS)
def test_every_object_with_another_text_is_in_doubt(
    then: dict[int, str], now: dict[int, str]
) -> None:
    for before in (read(then), recorded(read(then))):
        found = doubts(before, read(now))
        for oid, text in then.items():
            if now.get(oid) != text:
                assert any(counts(doubt, oid) for doubt in found)
    exact = doubts(read(then), read(now))
    same = [oid for oid, text in then.items() if now.get(oid) == text]
    assert not any(counts(doubt, oid) for doubt in exact for oid in same)


@given(OBJECTS, st.dictionaries(st.integers(301, 400), st.sampled_from("abc")))
def test_a_catalog_that_grows_leaves_what_there_was(
    then: dict[int, str], more: dict[int, str]
) -> None:
    now = read({**then, **more})
    assert doubts(read(then), now) == []
    [doubt] = doubts(recorded(read(then)), now)
    assert not any(counts(doubt, oid) for oid in then)


def test_what_an_older_version_did_not_record_is_in_doubt() -> None:
    [doubt] = doubts(NO_TEXTS, read({1: "a"}))
    assert doubt.is_total
    assert doubts(recorded(read({1: "$1"}, "money")), read({1: "$1"}, "money")) == []
    assert doubts(recorded(read({1: "1 €"}, "money")), read({1: "$1"}, "money")) != []


def test_a_fingerprint_with_texts_can_be_parsed_again() -> None:
    storage = TableFingerprint((), {1: 2}, numbered=3, publication="p")
    texts = read({1: "a", 700: "b"})
    text = str(replace(storage, texts=texts))
    assert TableFingerprint.parse(str(storage)) == storage
    assert TableFingerprint.parse(text) == replace(storage, texts=texts)


COLUMNS = (Column("id", 23, -1, pa.int32(), identity=True), Column("v", 2205, -1, pa.string()))
TABLE = Table(TableId("public", "t"), 16400, COLUMNS, key=("id",), before=("id",))


def batch(*values: str | None, xid: int = 5, lsn: int = 100) -> TableBatch:
    rows = [
        {
            "id": 1,
            "v": v,
            "_cdc_op": "c",
            "_cdc_lsn": lsn,
            "_cdc_xid": xid,
            "_cdc_ts": datetime.now(UTC),
        }
        for v in values
    ]
    return TableBatch(TABLE, pa.RecordBatch.from_pylist(rows, change_schema(TABLE)), 0)


@pytest.fixture
def streamed() -> StreamedTexts:
    found = StreamedTexts()
    found.record_poll({16400: read({1: "a"})}, PgSnapshot(5, 5), (), {16400: Lsn(50)})
    return found


def test_a_text_of_no_object_is_judged_by_a_later_catalog_read(
    streamed: StreamedTexts,
) -> None:
    assert not streamed.record_changes([batch("a", None, "-", "12345")])
    assert not streamed.record_changes([batch("b", lsn=49)]), "void: the table was read at 50"
    assert streamed.record_changes([batch("a", "b")])
    before, after = PgSnapshot(5, 5), PgSnapshot(6, 6)
    assert not streamed.has_news(before)
    assert streamed.has_news(after)
    assert streamed.difference(16400, read({1: "a"}), before) is None
    assert streamed.difference(16400, read({1: "a", 2: "b"}), after) is None
    assert streamed.difference(16400, read({1: "a"}), after) is not None
    streamed.record_poll({16400: read({1: "a"})}, after, [16400], {})
    assert not streamed.has_news(after)
    assert not streamed.record_changes([batch("b")]), (
        "void: a reading that sees it had the table read again"
    )
    assert streamed.record_changes([batch("b", xid=6)])


@pytest.mark.parametrize(
    ("item", "is_known"),
    [
        ("a=r/a", True),
        ("=r/a", True),
        ("b=r/a", False),
        ("a=r/b", False),
        ('"o \'=/""x"=r*w/"o \'=/""x"', True),
        ('"o "=r/a', False),
        ("16384=r/a", True),
    ],
)
def test_the_roles_of_an_aclitem(item: str, is_known: bool) -> None:  # noqa: FBT001
    uses = (TypeUse("aclitem", "value", "v", 1033),)
    texts = TableTexts((TypeTexts.from_catalog("aclitem", {1: "a", 2: "o '=/\"x"}),), uses)
    streamed = StreamedTexts()
    streamed.record_poll({16400: texts}, PgSnapshot(5, 5), (), {})
    assert streamed.record_changes([batch(item)]) is not is_known

"""What DDL in the WAL means for tables, and what of it is ignored."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.model.lsn import Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.user_types import TypeParts
from ingestd.postgres.rewrites.ddl_log import DdlEvent, DdlLog, KnownObject, parse, reason_of
from ingestd.postgres.rewrites.fingerprint import StoredColumn, TableFingerprint

TABLE, ROOT, LEAF, LATER, ENUM = 10, 20, 21, 22, 30
NAME, ROOT_NAME = TableId("public", "t"), TableId("public", "r")
COLUMNS = tuple(
    StoredColumn(n, t, -1, 1, has_missing=False, name=str(n)) for n, t in ((1, 23), (2, 25))
)
PLAIN = TableFingerprint(
    COLUMNS, {TABLE: 1}, types=(TypeParts(ENUM, 1, "x", parts=((31, "a"), (32, "b"))),)
)
PARTS = TableFingerprint(COLUMNS, {LEAF: 1})
MORE = ("types", "leaves", "labels", "root")
GOOD: dict[str, Any] = {"v": 1, "kind": "ALTER TABLE", "what": "table", "oid": TABLE}
CHANGED = DdlEvent("ALTER TABLE", "table", TABLE, NAME, types={1: 23, 2: 25})
SEEN = PgSnapshot(100, 100)
ALL_SEEN = PgSnapshot(1000, 1000)
AT = Lsn(500)
TABLES = {TABLE: (NAME, PLAIN), ROOT: (ROOT_NAME, PARTS)}
FORGED_TABLE = replace(CHANGED, types={1: 23}, table=NAME)
FORGED_TYPE = DdlEvent("ALTER TYPE", "type", ENUM, labels={31: "a", 32: "b"})


def log(**points: int) -> DdlLog:
    made = DdlLog()
    made.set_read_positions({int(oid[1:]): Lsn(point) for oid, point in points.items()})
    made.record_poll(TABLES, SEEN, ())
    return made


def record(log: DdlLog, event: DdlEvent, lsn: int = AT, xid: int = 200) -> bool:
    return log.record(event, Lsn(lsn), xid, lambda name: name.schema == "public")


@pytest.mark.parametrize(
    "other",
    [
        *({**GOOD, "v": v} for v in (0, 2, "1", 1.0, True, None)),
        *({**GOOD, "oid": o} for o in (-1, 1 << 32, "10", None)),
        {**GOOD, "oid": []},
        *({**GOOD, "kind": k} for k in ("alter table", "A" * 99, "", 3, None, "X\nY")),
        *({**GOOD, "what": w} for w in ("view", None)),
        {**GOOD, "what": []},
        *({**GOOD, key: 5.5} for key in ("root", "types", "leaves", "labels", "why")),
        *({k: v for k, v in GOOD.items() if k != without} for without in GOOD),
        [],
        None,
        1,
    ],
)
def test_what_others_wrote_is_no_event(other: object) -> None:
    assert parse(json.dumps(other).encode()) is None


@given(st.binary(max_size=99) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from([*GOOD, *MORE]), inner, max_size=9),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_no_content_is_an_error(content: bytes) -> None:
    parse(content)
    parse(b"[" * 100_000)


def test_names_in_another_encoding_are_not_compared() -> None:
    content = (
        b'{"v":1,"kind":"ALTER TABLE","what":"table","oid":10,"schema":"public","name":"\xe4"}'
    )
    event = parse(content)
    assert event is not None
    assert event.table is None


@pytest.mark.parametrize(
    ("event", "known", "reason"),
    [
        (
            DdlEvent("TRUNCATE", "truncate", LEAF, root=ROOT),
            KnownObject(),
            "a partition was truncated",
        ),
        *(
            (
                DdlEvent("ALTER TABLE", "rewrite", TABLE, why=why),
                KnownObject(),
                "rewritten by ALTER TABLE",
            )
            for why in (0, 1, 2, 4, 12, 16)
        ),
        (DdlEvent("ALTER TABLE", "rewrite", TABLE, why=8), KnownObject(), None),
        (DdlEvent("ALTER TABLE", "table column", TABLE), KnownObject(), "a column was renamed"),
        (CHANGED, KnownObject(NAME, {1: 23, 2: 25}), None),
        (CHANGED, KnownObject(NAME, {1: 23, 2: 1043}), None),
        (CHANGED, KnownObject(NAME, {1: 20, 3: 25}), "a column's type changed"),
        (CHANGED, KnownObject(TableId("other", "t")), "it was renamed, or moved to another schema"),
        (CHANGED, KnownObject(gone=frozenset({LEAF})), "a partition was detached or dropped"),
        (replace(CHANGED, what="dropped column"), KnownObject(NAME), None),
        (DdlEvent("ALTER TYPE", "composite type", ENUM), KnownObject(), "labels or attributes"),
        (
            DdlEvent("ALTER TYPE", "type", ENUM, labels={1: "b"}),
            KnownObject(labels={1: "a"}),
            "labels",
        ),
        (
            DdlEvent("ALTER TYPE", "type", ENUM, labels={1: "a", 2: "b"}),
            KnownObject(labels={1: "a"}),
            None,
        ),
    ],
)
def test_reasons(event: DdlEvent, known: KnownObject, reason: str | None) -> None:
    found = reason_of(event, [known])
    assert (found or "").startswith(reason or "")
    assert (found is None) == (reason is None)


def test_only_a_check_that_sees_the_transaction_judges() -> None:
    events = log()
    assert record(events, DdlEvent("TRUNCATE", "truncate", LEAF, root=ROOT))
    assert (events.visible_to(SEEN), events.awaits) == ({}, True)
    found = events.visible_to(ALL_SEEN)
    assert list(found) == [ROOT]
    assert not events.awaits
    events.record_poll({ROOT: (ROOT_NAME, PARTS)}, ALL_SEEN, found)
    assert events.visible_to(ALL_SEEN) == {}
    # It comes again, as after a lost connection.
    assert record(events, DdlEvent("TRUNCATE", "truncate", LEAF, root=ROOT))
    assert events.visible_to(ALL_SEEN) == {}


def test_an_event_before_the_table_was_read_is_void() -> None:
    events = log(t20=501)
    record(events, DdlEvent("TRUNCATE", "truncate", LEAF, root=ROOT))
    assert events.visible_to(ALL_SEEN) == {}
    record(events, DdlEvent("TRUNCATE", "truncate", LEAF, root=ROOT), lsn=501)
    assert list(events.visible_to(ALL_SEEN)) == [ROOT]


@pytest.mark.parametrize(
    "there_and_back",
    [
        [replace(CHANGED, table=TableId("other", "t")), CHANGED],
        [replace(CHANGED, types={1: 23, 2: 17}), CHANGED],
        [DdlEvent("ALTER TYPE", "type", ENUM, labels={31: "z", 32: "b"}),
         DdlEvent("ALTER TYPE", "type", ENUM, labels={31: "a", 32: "b"})],
        [DdlEvent("ALTER TYPE", "type", ENUM, labels={31: "a", 32: "b", 33: "c"}),
         DdlEvent("ALTER TYPE", "type", ENUM, labels={31: "a", 32: "b", 33: "d"})],
        [replace(CHANGED, types={1: 23, 3: 23}), replace(CHANGED, types={1: 23, 3: 20})],
    ],
)  # fmt: skip
def test_what_came_and_went_between_two_checks_is_read(there_and_back: list[DdlEvent]) -> None:
    for forged in (None, FORGED_TABLE, FORGED_TYPE):
        events = log()
        for number, event in enumerate(there_and_back):
            assert record(events, event, lsn=AT + number, xid=200 + number)
            if forged is not None:  # anybody may write one, which hides none
                record(events, forged, lsn=AT + number, xid=200 + number)
        assert list(events.visible_to(ALL_SEEN)) == [TABLE], forged


def test_what_is_kept_is_bounded() -> None:
    events = log()
    many = dict.fromkeys(range(10, 1000), 23)
    for number in range(30):
        record(events, replace(CHANGED, types={1: 23, **many, 2000 + number: 23}), lsn=AT + number)
        other = DdlEvent(
            "ALTER TABLE", "table", 10_000 + number, types=many, leaves=frozenset({99})
        )
        assert not record(events, other, lsn=AT + number)
    assert [*events.before] == [TABLE]
    assert not events.leaves
    assert list(events.visible_to(ALL_SEEN)) == [TABLE]
    assert "too many commands" in events.visible_to(ALL_SEEN)[TABLE]
    events.record_poll(TABLES, ALL_SEEN, [TABLE])
    assert [len(kept) for kept in events.before.values()] == [1]


def test_a_type_with_too_many_events_is_checked_in_each_table() -> None:
    events, others = DdlLog(most_kept=4), (11, 12)
    tables = {oid: (TableId("public", f"t{oid}"), PLAIN) for oid in (TABLE, *others)}
    events.record_poll(tables, SEEN, ())
    for number in range(3):
        labels = {31: "a", 32: "b", 33 + number: "new"}
        record(events, replace(FORGED_TYPE, labels=labels), lsn=AT + number)
    assert sorted(events.visible_to(ALL_SEEN)) == [TABLE, *others]


@pytest.mark.parametrize("is_seen", [False, True], ids=["new", "of a backlog"])
def test_partitions_that_came_or_went(*, is_seen: bool) -> None:
    xid = 50 if is_seen else 200
    root = DdlEvent(
        "ALTER TABLE", "table", ROOT, ROOT_NAME, types={1: 23}, leaves=frozenset({LEAF})
    )
    events = log()
    assert record(events, root, xid=xid)
    assert events.visible_to(ALL_SEEN) == {}
    made = DdlEvent("CREATE TABLE", "table", LATER, TableId("public", "l"), root=ROOT)
    assert record(events, made, xid=xid)
    assert events.visible_to(ALL_SEEN) == {}
    assert record(events, DdlEvent("DROP TABLE", "dropped table", LATER), xid=xid)
    assert list(events.visible_to(ALL_SEEN)) == [ROOT]


def test_a_backlogs_fewer_partitions_are_those_that_came_later() -> None:
    none = DdlEvent("ALTER TABLE", "table", ROOT, ROOT_NAME, leaves=frozenset())
    events = log()
    record(events, none, xid=50)
    assert events.visible_to(ALL_SEEN) == {}
    events = log()
    record(events, none, xid=200)
    assert list(events.visible_to(ALL_SEEN)) == [ROOT]


def test_others_tables_have_nothing_checked() -> None:
    events = log()
    assert not record(events, DdlEvent("CREATE TABLE", "table", 99, TableId("other", "x")))
    assert not record(events, DdlEvent("DROP TABLE", "dropped table", 99))
    assert record(events, DdlEvent("CREATE TABLE", "table", 99, TableId("public", "x")))

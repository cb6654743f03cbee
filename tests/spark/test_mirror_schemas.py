from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from ingestd.model.schema import Column, Table, TableId, with_before
from spark_jobs.epochs import latest
from tests.spark.test_mirror import Mirror, change, mirror, raw, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.harness.raw_lake import RawLake

pytestmark = pytest.mark.spark_matrix
__all__ = ["mirror", "raw"]


@pytest.mark.thorough
def test_columns_that_come_are_filled_with_what_old_rows_have(mirror: Mirror, raw: RawLake) -> None:
    t = table("a")
    raw.commit({t: [change("c", i, "old", raw.next_lsn(), 1) for i in (1, 2, 3)]})
    raw.record("live", t)
    assert mirror.run() == 0
    added = (
        Column("x y", 23, -1, pa.int32(), "integer", missing="5"),
        Column("at", 1184, -1, pa.timestamp("us", "UTC"), "timestamptz", missing="infinity"),
        Column("plain", 25, -1, pa.string(), "text"),
        Column("local", 1114, -1, pa.timestamp("us"), "timestamp", missing="2024-02-29 01:02:03"),
    )
    wide = replace(t, columns=(*t.columns, *added))
    raw.record("live", wide, at_lsn=raw.next_lsn())
    first = change("u", 1, "new", raw.next_lsn(), 1, plain="p") | {"x y": 9}
    raw.commit({wide: [first]})
    assert mirror.run() == 0
    found = mirror.rows(wide, "id", "note", "x y", "at", "plain", texts=["at"])
    assert found == [
        (1, "new", 9, None, "p", None),
        (2, "old", 5, None, None, "infinity"),
        (3, "old", 5, None, None, "infinity"),
    ]
    local = datetime(2024, 2, 29, 1, 2, 3)  # noqa: DTZ001 - timestamp without time zone
    assert [row[0] for row in mirror.rows(wide, "local") if row[0]] == [local, local]

    # nothing is written to the table, and it has a column more
    wider = replace(wide, columns=(*wide.columns, Column("z", 16, -1, pa.bool_(), missing="t")))
    other = table("other", oid=2)
    raw.record("live", wider, at_lsn=raw.next_lsn())
    raw.commit({other: [change("c", 1, None, raw.next_lsn(), 1)]})
    raw.record("live", other)
    assert mirror.run() == 0
    assert mirror.rows(wider, "id", "z") == [(1, True), (2, True), (3, True)]

    # re-read with another type: the new column has the values, the old one is dropped
    typed = replace(
        t, columns=(t.columns[0], t.columns[1], Column("n", 25, -1, pa.string(), stored_as="n__v2"))
    )
    at = raw.next_lsn()
    raw.record("snapshotting", typed, reason="rewritten")
    rows = [{"_cdc_op": "r", "id": 1, "n__v2": "one", "_cdc_lsn": raw.next_lsn(), "_cdc_seq": 0}]
    raw.commit({typed: [*rows, {"_cdc_op": "t", "_cdc_lsn": at, "_cdc_seq": -1}]})
    raw.record("live", typed)
    assert mirror.run() == 0
    assert mirror.rows(typed, "id", "note", "n__v2") == [(1, None, "one")]
    assert "n" not in latest(mirror.spark, mirror.target)[str(t.id)].columns


def test_columns_with_names_of_the_jobs_own(mirror: Mirror, raw: RawLake) -> None:
    names = {"note": "copy", "n": "there"}
    bare = table("bare", identity="f")
    columns = tuple(replace(c, name=names.get(c.name, c.name)) for c in bare.columns)
    t = replace(bare, columns=columns, before=tuple(c.name for c in columns))
    rows = [{"id": n, "copy": f"c{n}", "there": n} for n in (1, 2, 3)]

    def commit(op: str, *content: Mapping[str, object]) -> None:
        lsn = raw.next_lsn()
        found = enumerate(content, 1)
        raw.commit({t: [{**r, "_cdc_op": op, "_cdc_lsn": lsn, "_cdc_seq": n} for n, r in found]})

    commit("c", rows[0], rows[0])
    raw.record("live", t)
    assert mirror.run() == 0
    commit("c", rows[1], rows[2])
    assert mirror.run() == 0
    commit("d", rows[0], rows[2])
    assert mirror.run() == 0
    assert mirror.rows(t, "id", "copy", "there") == [(1, "c1", 1), (2, "c2", 2)]


def test_keys_that_their_columns_can_not_hold(mirror: Mirror, raw: RawLake) -> None:
    columns = (
        Column("on", 1082, -1, pa.date32(), "date", identity=True),
        Column("of.`it`", 25, -1, pa.string(), "text", identity=True),
        Column("v", 23, -1, pa.int32(), "integer"),
    )
    key = ("on", "of.`it`")
    t = with_before(Table(TableId("public", "a b"), 1, columns, "d", key), full=False)
    infinite = {"_cdc_raw": [("on", "infinity")]}
    day = datetime(2024, 2, 29, tzinfo=UTC).date()

    def row(op: str, seq: int, on: object, v: int | None, **more: object) -> dict[str, object]:
        at = {"_cdc_lsn": raw.lsn, "_cdc_seq": seq}
        return {"_cdc_op": op, "on": on, "of.`it`": "k", "v": v, **at, **more}

    raw.next_lsn()
    other = {"_cdc_raw": [("on", "-infinity")]}
    raw.commit(
        {t: [row("c", 1, None, 1, **infinite), row("c", 2, None, 2, **other), row("c", 3, day, 3)]}
    )
    raw.record("live", t)
    assert mirror.run() == 0
    raw.next_lsn()
    before = {"on": None, "of.`it`": "k"}
    moved = {
        "_cdc_before": before,
        "_cdc_raw": [("_cdc_before.on", "-infinity")],
        "_cdc_unchanged": ["v"],
    }
    raw.commit(
        {
            t: [
                row("u", 1, None, 10, **infinite),
                row("d", 2, day, None),
                row("u", 3, day, None, **moved),
            ]
        }
    )
    assert mirror.run() == 0
    found = mirror.rows(t, "on", "v", texts=["on"])
    assert sorted(found, key=str) == sorted([(None, 10, "infinity"), (day, 2, None)], key=str)


@pytest.mark.thorough
def test_deleted_rows_stay_with_soft_deletes(mirror: Mirror, raw: RawLake) -> None:
    t = table("a")
    raw.commit({t: [change("c", i, "x", raw.next_lsn(), 1) for i in (1, 2, 3)]})
    raw.record("live", t)
    assert mirror.run("--soft-deletes") == 0
    raw.commit({t: [{"_cdc_op": "d", "id": 1, "_cdc_lsn": raw.next_lsn(), "_cdc_seq": 1}]})
    deleted_at = raw.at()
    assert mirror.run("--soft-deletes") == 0
    assert [row[0] for row in mirror.rows_by_spark(t)] == [2, 3]
    every = every_row(mirror)
    assert every[1].replace(tzinfo=UTC) == deleted_at
    truncated = {"_cdc_op": "t", "_cdc_lsn": raw.next_lsn(), "_cdc_seq": 1}
    raw.commit({t: [truncated, change("c", 1, "again", raw.lsn, 2)]})
    assert mirror.run("--soft-deletes") == 0
    assert mirror.rows(t) == [(1, "again", 1)]
    every = every_row(mirror)
    assert every[1] is None
    assert {every[i].replace(tzinfo=UTC) for i in (2, 3)} == {raw.at()}


def every_row(mirror: Mirror) -> dict[int, datetime]:
    path = f"{mirror.target}/public/a"
    rows = mirror.spark.read.format("delta").load(path).select("id", "_cdc_deleted_at").collect()
    return {row[0]: row[1] for row in rows}


def test_changes_with_another_identity_stop_their_table(mirror: Mirror, raw: RawLake) -> None:
    """Also where rows have no key any more; what `--tables` leaves out stays in the cut."""
    keyed, other = table("a"), table("other", oid=2)
    first = raw.next_lsn()
    raw.commit({t: [change("c", i, "x", first, i) for i in (1, 2)] for t in (keyed, other)})
    raw.record("live", keyed, other)
    assert mirror.run() == 0
    assert mirror.run("--tables", "public.other", "--rebuild", "public.other") == 0
    assert list(latest(mirror.spark, mirror.target)) == ["public.a", "public.other"]

    whole = table("a", identity="f")
    deleted = {"_cdc_op": "d", "id": 1, "_cdc_lsn": raw.next_lsn(), "_cdc_seq": 1}
    raw.commit({keyed: [deleted]})
    at = raw.next_lsn()
    raw.record("live", whole, at_lsn=at)
    raw.commit({whole: [change("d", 2, "x", at, 1)]})
    assert mirror.run() == 1
    assert list(latest(mirror.spark, mirror.target)) == ["public.other"]
    again = raw.next_lsn()
    raw.record("snapshotting", whole, reason="asked for")
    raw.commit({whole: [{"_cdc_op": "t", "_cdc_lsn": again, "_cdc_seq": -1}]})
    raw.record("live", whole)
    assert mirror.run() == 0
    assert mirror.rows(whole) == []


@pytest.mark.thorough
def test_texts_of_a_column_that_is_no_more_are_no_part_of_a_row(
    mirror: Mirror, raw: RawLake
) -> None:
    """Nor of a column that is re-created under its name."""
    day = Column("day", 1082, -1, pa.date32(), "date")
    keyed, keyless = table("a", day), table("b", replace(day, identity=True), identity="f", oid=2)
    at = raw.next_lsn()
    infinite = {"_cdc_raw": [("day", "infinity")]}
    rows = [change("c", i, "old", at, i) | infinite for i in (1, 2, 3)]
    raw.commit({keyed: rows, keyless: rows})
    raw.record("live", keyed, keyless)
    assert mirror.run() == 0

    bare, bare_keyless = table("a"), table("b", identity="f", oid=2)
    raw.record("live", bare, bare_keyless, at_lsn=raw.next_lsn())
    gone = change("d", 1, "old", raw.next_lsn(), 1)
    raw.commit({bare: [gone], bare_keyless: [gone]})
    assert mirror.run() == 0
    assert mirror.rows(bare_keyless, "id") == mirror.rows(bare, "id") == [(2,), (3,)]

    raw.record("live", keyed, keyless, at_lsn=raw.next_lsn())
    changed = change("u", 2, "new", raw.next_lsn(), 1)
    before = {"_cdc_before": {"id": 2, "note": "old", "n": 1, "day": None}}
    raw.commit({keyed: [changed], keyless: [changed | before]})
    assert mirror.run("--rebuild", "public.b") == 0
    for made_again in (keyed, keyless):
        found = mirror.rows(made_again, "id", "note", "day", "_cdc_raw")
        assert found == [(2, "new", None, None), (3, "old", None, None)]
    raw.commit({keyless: [change("d", 3, "old", raw.next_lsn(), 1)]})
    assert mirror.run() == 0
    assert mirror.rows(keyless, "id", "note", "_cdc_raw") == [(2, "new", None)]

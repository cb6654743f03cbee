"""Mirrors and histories with `--variant`: jsonb as VARIANT, equal to the JSON of the source."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import MapType, StringType, StructField, StructType

from ingestd.model.errors import TableError
from ingestd.model.schema import Column
from spark_jobs.epochs import latest
from spark_jobs.histories.job import HistoryJob
from spark_jobs.lake.exchange import from_arrow
from spark_jobs.lake.targets import table_path
from spark_jobs.lake.variants import as_texts, parsed
from spark_jobs.mirror import main
from spark_jobs.mirrors.job import MirrorJob
from spark_jobs.mirrors.policy import MirrorPolicy
from tests.harness.documents import DOCUMENTS, MOST_DEPTH, is_held, jsonb_text, plain
from tests.harness.history_logs import KeyedLog, KeylessLog
from tests.spark.test_history import (
    KEYED,
    KEYLESS,
    Job,
    assert_same,
    fold_keyed,
    fold_keyless,
    session,
    write,
)
from tests.spark.test_history import plain as versions_of
from tests.spark.test_mirror import Mirror, Simulated, change, mirror, raw, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import SparkSession

    from ingestd.model.schema import Table
    from tests.harness.raw_lake import Change, RawLake

__all__ = ["mirror", "raw", "session"]
Row = dict[str, Any]
RAW = MapType(StringType(), StringType())
JSONB = Column("note", 3802, -1, pa.string(), "jsonb")
LONG = "1" * 39
"""A number that VARIANT can't hold."""


# --- values --------------------------------------------------------------------------------------


def stored(spark: SparkSession, texts: Sequence[str | None]) -> list[Row]:
    """Return texts as a job stores them, in order: the VARIANT, also as JSON, and `_cdc_raw`."""
    rows = from_arrow(
        spark, pa.table({"n": range(len(texts)), "doc": pa.array(texts, pa.string())})
    )
    rows = rows.selectExpr("*", "CAST(NULL AS map<string,string>) AS _cdc_raw")
    found = parsed(as_texts(rows, ["doc"]), ["doc"]).selectExpr(
        "n", "to_json(doc) AS doc", "doc AS value", "_cdc_raw"
    )
    return [row.asDict() for row in sorted(found.collect(), key=lambda row: row["n"])]


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[*HealthCheck],
    phases=[Phase.explicit, Phase.generate],  # one job for each attempt to shrink takes too long
)
@given(st.lists(DOCUMENTS, min_size=40, max_size=120))
def test_a_variant_is_the_json_of_its_source(spark: SparkSession, documents: list[Any]) -> None:
    """To the last digit; else it is null, and the text is in `_cdc_raw`, as the source wrote it."""
    texts = [jsonb_text(document) for document in documents]
    for document, text, row in zip(documents, texts, stored(spark, texts), strict=True):
        if is_held(document):
            assert row["_cdc_raw"] is None, text
            assert plain(row["doc"]) == plain(text), text
            assert not has_float(row["value"].toPython()), text
        else:
            assert (row["doc"], row["_cdc_raw"]) == (None, {"doc": text})


def has_float(value: Any) -> bool:
    """Return whether a number in a value is no exact one."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, float) or any(map(has_float, inner))


def test_texts_at_the_limits_of_variant(spark: SparkSession) -> None:
    deep, deeper = ("[" * n + "]" * n for n in (MOST_DEPTH, MOST_DEPTH + 1))
    big = json.dumps({"a": 'x\\"' * 300_000}, separators=(",", ":"))
    long = json.dumps("1" * 100)
    texts = [None, "null", deep, big, long, '""', deeper, "", "x", "1e5", '{"a": 1, "a": 2}']
    held = 6
    found = stored(spark, texts)
    assert [row["_cdc_raw"] for row in found] == [None] * held + [{"doc": t} for t in texts[held:]]
    assert [row["doc"] for row in found] == [*texts[:held], *[None] * (len(texts) - held)]


def test_old_rows_have_texts_as_well(spark: SparkSession) -> None:
    old = StructType([StructField("a.b", StringType()), StructField("id", StringType())])
    schema = StructType(
        [
            StructField("a.b", StringType()),
            StructField("_cdc_before", old),
            StructField("_cdc_raw", RAW),
        ]
    )
    rows = [
        ('{"x": 1.50}', (LONG, "1"), {"day": "infinity"}),
        (LONG, ("[1, 2]", "2"), None),
        (None, None, None),
    ]
    found = as_texts(spark.createDataFrame(rows, schema), ["a.b", "other"])
    assert found.schema == schema
    assert as_texts(found, ["a.b"]).collect() == found.collect()
    first, second, third = [row.asDict(recursive=True) for row in found.collect()]
    assert Decimal(json.loads(first["a.b"], parse_float=str)["x"]) == Decimal("1.5")
    assert first["_cdc_before"] == {"a.b": None, "id": "1"}
    assert first["_cdc_raw"] == {"day": "infinity", "_cdc_before.a.b": LONG}
    assert second == {
        "a.b": None,
        "_cdc_before": {"a.b": "[1,2]", "id": "2"},
        "_cdc_raw": {"a.b": LONG},
    }
    assert third == {"a.b": None, "_cdc_before": None, "_cdc_raw": None}


# --- mirrors -------------------------------------------------------------------------------------


def document(note: str | None) -> str | None:
    """Return a JSON text for a note: each fourth can't be held."""
    if note is None:
        return None
    number = LONG if len(note) % 4 == 0 else "1.50"
    return f'{{"n": {number}, "note": {json.dumps(note)}, "list": [null, {{"a": true}}]}}'


def with_documents(of: Table) -> Table:
    note = replace(of.column("note"), type_oid=3802, pg_type="jsonb")
    return replace(of, columns=tuple(note if c.name == "note" else c for c in of.columns))


def as_documents(rows: Sequence[Change]) -> list[Change]:
    found = []
    for row in rows:
        made = {**row, "note": document(row.get("note"))}
        before = row.get("_cdc_before")
        if before and "note" in before:
            made["_cdc_before"] = {**before, "note": document(before["note"])}
        found.append(made)
    return found


def meaning(text: str | None) -> Any:
    return None if text is None else plain(text)


def rows_of(mirror: Mirror, of: Table, *others: str) -> list[tuple[Any, ...]]:
    """Return the id, the meaning of the note (its text if it is kept as text), and others."""
    found = latest(mirror.spark, mirror.target)[str(of.id)]
    assert dict(found.dtypes)["note"] == "variant"
    rows = found.selectExpr("id", "to_json(note) AS note", "_cdc_raw", *others).collect()
    shown = [
        (row["id"], (row["_cdc_raw"] or {}).get("note", meaning(row["note"])), *row[3:])
        for row in rows
    ]
    return sorted(shown, key=str)


def expected(*rows: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the same of rows of the source, whose second value is the note."""
    shown = []
    for key, note, *others in rows:
        text = document(note)
        value = text if text is not None and LONG in text else meaning(text)
        shown.append((key, value, *others))
    return sorted(shown, key=str)


WAYS: Sequence[dict[str, int]] = (
    {},  # folded in the driver, then a plain write
    {"small_bytes": 0, "changed_share": 0},  # folded in the driver, then a MERGE
    {"few_rows": -1, "driver_rows": -1, "small_bytes": 0, "changed_share": 0},  # all by Spark
    {"few_rows": -1, "driver_rows": -1},  # by Spark, then a plain write
)


@pytest.mark.parametrize(
    ("seed", "batches", "more"),
    [
        (2, 2, ()),
        pytest.param(4, 8, (), marks=pytest.mark.thorough),
        pytest.param(1, 3, ("--no-accelerator",), marks=pytest.mark.thorough),
    ],
)
def test_a_mirror_with_variants_equals_its_source(
    mirror: Mirror, raw: RawLake, seed: int, batches: int, more: Sequence[str]
) -> None:
    """Updates with values not sent, key changes, deletes, truncates, chunks that come late."""
    chance = random.Random(seed)
    one = Simulated(with_documents(table("a")), chance)
    for batch in range(batches):
        for _ in range(10):
            one.transaction(raw.next_lsn())
        if batch == batches // 2 + 1:
            one.truncate(raw.next_lsn())
            one.transaction(raw.next_lsn())
        late, one.late, one.held = one.late, one.held, []
        raw.commit({one.table: as_documents([*one.take(), *late])})
        one.read(raw.next_lsn())
        raw.record("live", one.table)
        job = MirrorJob(variant=True, policy=MirrorPolicy(**WAYS[(batch + seed) % len(WAYS)]))
        assert mirror.run("--variant", *more, job=job) == 0
        assert rows_of(mirror, one.table, "n") == expected(*one.expected()), f"batch {batch}"


class KilledError(Exception):
    pass


def kill(_: str) -> None:
    raise KilledError


@pytest.mark.thorough
def test_copies_of_rows_with_variants_are_counted(
    mirror: Mirror, raw: RawLake, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of the lake are compared with rows of the mirror, also by texts kept as such.

    A run that is killed before the cut is repeated without effect.
    """
    t = with_documents(table("a", identity="f"))

    def whole(op: str, seq: int, new: str | None, old: str | None = None) -> Change:
        row = {"id": 1, "note": new, "n": None}
        before = {"id": 1, "note": old, "n": None} if op == "u" else None
        at = {"_cdc_lsn": raw.lsn, "_cdc_seq": seq}
        return row | {"_cdc_op": op, "_cdc_before": before, **at}

    held, kept = "abc", "abcd"
    raw.commit({t: as_documents([whole("r", 0, note) for note in (held, held, kept, kept, None)])})
    raw.record("live", t)
    assert mirror.run("--variant") == 0
    assert "variant.kept_as_text" in "".join(capsys.readouterr())
    raw.next_lsn()
    unsent = whole("u", 3, None, held) | {"_cdc_unchanged": ["note"], "id": 2}
    changes = [whole("d", 1, kept), whole("u", 2, "new", kept), unsent]
    raw.commit({t: as_documents(changes)})
    lake = ["--lake", str(raw.uri), "--source", raw.source, "--target", mirror.target]
    with pytest.raises(KilledError):
        main([*lake, "--once", "--variant"], after_commit=kill)
    assert mirror.run("--variant") == 0
    wanted = expected((1, held), (1, "new"), (1, None), (2, held))
    assert rows_of(mirror, t) == wanted
    raw.next_lsn()
    raw.commit({t: as_documents([whole("c", 1, kept)])})
    assert mirror.run("--variant") == 0
    assert rows_of(mirror, t) == sorted([*wanted, *expected((1, kept))], key=str)


@pytest.mark.thorough
def test_columns_of_jsonb_come_and_change(mirror: Mirror, raw: RawLake) -> None:
    """With defaults in old rows; a column of another type becomes jsonb in a second column.

    A dropped one is null in rows that change. Columns that come with a re-snapshot may need more
    features of the table.
    """
    t = table("a")
    raw.commit({t: [change("c", i, "old", raw.next_lsn(), 1) for i in (1, 2)]})
    raw.record("live", t)
    assert mirror.run("--variant") == 0
    exact = Column("exact", 3802, -1, pa.string(), "jsonb", missing='{"a": [1.50, "x\'\\\\"]}')
    kept = Column("kept", 3802, -1, pa.string(), "jsonb", missing=LONG)
    wide = replace(t, columns=(*t.columns, exact, kept))
    raw.record("live", wide, at_lsn=raw.next_lsn())
    new = change("u", 1, "new", raw.next_lsn(), 1, exact="[1]", kept="{}")
    raw.commit({wide: [new]})
    assert mirror.run("--variant") == 0
    rows = latest(mirror.spark, mirror.target)[str(t.id)].orderBy("id")
    found = rows.selectExpr("to_json(exact)", "to_json(kept)", "_cdc_raw").collect()
    assert [(meaning(row[0]), row[1]) for row in found] == [
        ([1], "{}"),
        ({"a": [Decimal("1.5"), "x'\\"]}, None),
    ]
    assert [row[2] for row in found] == [None, {"kept": LONG}]
    bare = replace(t, columns=(*t.columns, exact))
    raw.record("live", bare, at_lsn=raw.next_lsn())
    for key, policy in ((1, WAYS[0]), (2, WAYS[1])):
        raw.commit({bare: [change("u", key, "new", raw.next_lsn(), 1, exact="[2]")]})
        job = MirrorJob(variant=True, policy=MirrorPolicy(**policy))
        assert mirror.run("--variant", job=job) == 0
        rows = latest(mirror.spark, mirror.target)[str(t.id)].where(f"id = {key}")
        [found_one] = rows.selectExpr("to_json(exact)", "kept IS NULL").collect()
        assert tuple(found_one) == ("[2]", True)
    retyped = Column("n", 3802, -1, pa.string(), "jsonb", stored_as="n__v2")
    local = Column("local time", 1114, -1, pa.timestamp("us"), "timestamp")
    typed = replace(bare, columns=(*t.columns[:2], retyped, exact, local))
    at = raw.next_lsn()
    raw.record("snapshotting", typed, reason="rewritten")
    read = {"_cdc_op": "r", "id": 1, "n__v2": "[1, 2]", "_cdc_lsn": raw.next_lsn(), "_cdc_seq": 0}
    raw.commit({typed: [read, {"_cdc_op": "t", "_cdc_lsn": at, "_cdc_seq": -1}]})
    raw.record("live", typed)
    assert mirror.run("--variant") == 0
    [row] = latest(mirror.spark, mirror.target)[str(t.id)].selectExpr("to_json(n__v2)").collect()
    assert row[0] == "[1,2]"


@pytest.mark.thorough
def test_the_query_of_the_docs_runs(mirror: Mirror, raw: RawLake) -> None:
    page = (Path(__file__).parents[2] / "docs" / "mirror.md").read_text("utf-8")
    section = page.partition("## jsonb as VARIANT\n")[2].partition("\n## ")[0]
    [query] = re.findall(r"```sql\n(.*?)```", section, re.DOTALL)
    details = Column("details", 3802, -1, pa.string(), "jsonb")
    t = table("products", details)
    texts = ['{"color": "red", "weight": 1.25}', '{"color": "blue"}', "[1]"]
    rows = [change("c", key, "", raw.next_lsn(), 1, details=text) for key, text in enumerate(texts)]
    raw.commit({t: rows})
    raw.record("live", t)
    assert mirror.run("--variant") == 0
    path = table_path(mirror.target, str(t.id))
    [found] = mirror.spark.sql(query.replace("mirror/public/products", path)).collect()
    assert tuple(found) == (0, Decimal("1.25"))


def test_another_choice_than_a_mirrors_stops_it_until_rebuilt(
    mirror: Mirror, raw: RawLake, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with deleted rows, which only the mirror has. A table without jsonb is not concerned."""
    t, other = with_documents(table("a")), table("other", oid=2)
    notes = {1: "abc", 2: "abcd", 3: "b"}
    rows = [change("c", key, note, raw.next_lsn(), 1) for key, note in notes.items()]
    raw.commit({t: as_documents(rows), other: rows})
    raw.record("live", t, other)
    assert mirror.run("--soft-deletes") == 0

    def delete(key: int) -> None:
        gone = {"_cdc_op": "d", "id": key, "_cdc_lsn": raw.next_lsn(), "_cdc_seq": 1}
        raw.commit({t: [gone], other: [gone]})

    delete(2)
    assert mirror.run("--soft-deletes") == 0
    delete(3)
    assert mirror.run("--soft-deletes", "--variant") == 1
    said = capsys.readouterr().err
    assert "column note was made without --variant" in said
    assert "--rebuild public.a re-creates it; or move it by a separate job without" in said
    assert "public.other" not in said
    assert mirror.run("--soft-deletes", "--variant", "--rebuild", "public.a") == 0
    assert rows_of(mirror, t) == expected((1, "abc"))
    delete(1)
    assert mirror.run("--soft-deletes", "--variant") == 0
    path = table_path(mirror.target, "public.a")
    every = as_texts(mirror.spark.read.format("delta").load(path)).orderBy("id").collect()
    kept = [(row["_cdc_raw"] or {}).get("note", meaning(row["note"])) for row in every]
    assert kept == [note for _, note in expected(*notes.items())]
    assert all(row["_cdc_deleted_at"] for row in every)
    raw.commit({t: as_documents([change("c", 4, "abc", raw.next_lsn(), 1)])})
    assert mirror.run("--soft-deletes") == 1
    assert "or move it by a separate job with --variant" in capsys.readouterr().err
    assert mirror.run("--soft-deletes", "--rebuild", "public.a") == 0
    found = latest(mirror.spark, mirror.target)["public.a"]
    assert [tuple(row) for row in found.select("id", "note").collect()] == [(4, document("abc"))]


# --- histories -----------------------------------------------------------------------------------


def note_of(big: str | None) -> str | None:
    return None if big is None else document(big)


def of_jsonb(of: Table) -> Table:
    big = replace(of.column("big"), type_oid=3802, pg_type="jsonb")
    return replace(of, columns=tuple(big if c.name == "big" else c for c in of.columns))


def in_jsonb(row: Mapping[str, Any]) -> Row:
    """Return a raw row with a document as `big`."""
    found = {**row, "big": note_of(row.get("big"))}
    if row.get("_cdc_before") and "big" in row["_cdc_before"]:
        found["_cdc_before"] = row["_cdc_before"] | {"big": note_of(row["_cdc_before"]["big"])}
    return found


def in_variant(row: Mapping[str, Any]) -> Row:
    """Return the row as a history has it."""
    found = in_jsonb(row)
    raw = list(found["_cdc_raw"] or ())
    for prefix, values in (("", found), ("_cdc_before.", found.get("_cdc_before") or {})):
        text = values.get("big")
        if text is not None and LONG in text:
            raw.append((f"{prefix}big", text))
            values["big"] = None
        elif text is not None:
            values["big"] = shown(text)
    return found | {"_cdc_raw": raw or None}


def shown(text: str) -> str:
    """Return a held document as Spark writes it."""
    found = json.loads(text, parse_float=lambda number: float(Decimal(number)))
    return json.dumps(found, separators=(",", ":"), sort_keys=True)


@pytest.mark.parametrize("kind", ["keyed", pytest.param("keyless", marks=pytest.mark.thorough)])
async def test_a_history_with_variants_is_that_of_its_changes(
    session: SparkSession, lake: Path, tmp_path: Path, kind: str
) -> None:
    """Late reads and `t`s, key changes, unsent values: what did not change is no new version."""
    rng, is_keyed = random.Random(3), kind == "keyed"
    log: KeyedLog | KeylessLog
    if is_keyed:
        log = KeyedLog(rng, keys=20)
        log.first_load()
        for _ in range(30):
            log.transaction()
        log.close()
        log.read_anew(transactions=3)
    else:
        log = KeylessLog(rng)
        log.read()
        for late in (0, 3):
            for _ in range(5):
                log.transaction()
            log.close()
            log.read(late=late)
        log.transaction()
        log.close()
    epochs = [epoch for epoch in log.epochs if epoch]
    of, fold = (KEYED, fold_keyed) if is_keyed else (KEYLESS, fold_keyless)
    ends = await write(lake, of_jsonb(of), [[in_jsonb(row) for row in epoch] for epoch in epochs])
    job = Job(session, lake, str(tmp_path / "history"), str(of.id), job=HistoryJob(variant=True))
    for epoch in (1, len(epochs)):
        job.move(epoch, ends[epoch - 1])
        wanted = [[in_variant(row) for row in one] for one in epochs[:epoch]]
        assert_same(job.versions(), versions_of(wanted, fold))
    assert dict(session.read.format("delta").load(job.path).dtypes)["big"] == "variant"
    job.job = HistoryJob()
    with pytest.raises(TableError, match=r"column big was made with --variant"):
        job.move(len(epochs), ends[-1])

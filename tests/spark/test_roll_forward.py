"""Rows moved on by a change log, against the plain fold of both; rows as hashes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from spark_jobs.lake.exchange import from_arrow
from spark_jobs.reconciling.differences import differences, differing_ranges, sums_by_range
from spark_jobs.reconciling.roll_forward import roll_forward
from spark_jobs.reconciling.row_hashes import RAW, WEIGHT, ComparedTable, hashed
from tests.harness.plain_mirror import Row, fold

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

L = 1000
# names that a comparison might use itself
COLUMNS = pa.schema(
    [("id", pa.int32()), ("h1", pa.string()), ("weight", pa.string()), ("a `key`.x", pa.float64())]
)
NAMES = COLUMNS.names
CDC = pa.schema(
    [
        ("_cdc_op", pa.string()),
        ("_cdc_lsn", pa.int64()),
        ("_cdc_seq", pa.int64()),
        ("_cdc_before", pa.struct(list(COLUMNS))),
        ("_cdc_unchanged", pa.list_(pa.string())),
        (RAW, pa.map_(pa.string(), pa.string())),
    ]
)
LOG = pa.schema([*COLUMNS, *CDC])


def frame(spark: SparkSession, rows: list[Row], schema: pa.Schema = LOG) -> DataFrame:
    made = [{**row, RAW: list((row.get(RAW) or {}).items())} for row in rows]
    return from_arrow(spark, pa.Table.from_pylist(made, schema))


def comparison(rows: DataFrame, key: tuple[str, ...] = ("id", "h1"), **more: Any) -> ComparedTable:
    kinds = tuple((n, rows.schema[n].dataType) for n in NAMES)
    return ComparedTable(kinds, key, ranges=16, **more)


def counted(rows: DataFrame) -> Counter[tuple[int, int, int]]:
    found: Counter[tuple[int, int, int]] = Counter()
    for row in rows.select("h1", "h2", "row", WEIGHT).collect():
        found[row[0], row[1], row[2]] += row[3]
    return +found


@dataclass
class Log:
    """A random table, and what happens to it from L on."""

    rng: random.Random
    has_key: bool
    there: list[Row] = field(default_factory=list)
    changes: list[Row] = field(default_factory=list)

    def values(self) -> Row:
        rng = self.rng
        row: Row = {
            "id": rng.randint(1, 9 if self.has_key else 3),
            "h1": rng.choice(["a", "b"]),
            "weight": rng.choice([None, "", "long", "x"]),
            "a `key`.x": rng.choice([None, 0.0, -0.0, float("nan"), 1.5]),
            RAW: {},
        }
        if row["weight"] is None and rng.random() < 0.5:
            row[RAW] = {"weight": "\\xff"}
        return row

    def find(self, row: Row) -> Row | None:
        names = ("id", "h1") if self.has_key else ()
        return next(
            (r for r in self.there if [r[n] for n in names] == [row[n] for n in names]), None
        )

    def start(self, count: int) -> list[Row]:
        while len(self.there) < count:
            row = self.values()
            if not self.has_key or self.find(row) is None:
                self.there.append(row)
        return [dict(row) for row in self.there]

    def add(
        self, op: str, row: Row, before: Row | None = None, unsent: tuple[str, ...] = ()
    ) -> None:
        seq = len(self.changes) % 7 + 1
        lsn = L + len(self.changes) // 7 * 10
        raw = {n: t for n, t in row[RAW].items() if n not in unsent}
        sent = {n: None if n in unsent else v for n, v in row.items()}
        old = None
        if before is not None:
            raw |= {f"_cdc_before.{n}": t for n, t in before[RAW].items()}
            every = {n: before[n] for n in NAMES}
            old = {n: v for n, v in every.items() if not self.has_key or n in {"id", "h1"}}
        self.changes.append(
            {
                **sent,
                "_cdc_op": op,
                "_cdc_lsn": lsn,
                "_cdc_seq": seq,
                "_cdc_before": old,
                "_cdc_unchanged": list(unsent) or None,
                RAW: raw,
            }
        )

    def step(self) -> None:
        rng = self.rng
        choice = rng.random()
        if choice < 0.02:
            self.there.clear()
            self.add("t", {**dict.fromkeys(NAMES), RAW: {}})
            return
        row = self.values()
        held = self.find(row) if self.has_key else None
        if not self.there or (choice < 0.4 and held is None):
            self.there.append(row)
            self.add("c", row)
            return
        old = held or rng.choice(self.there)
        if choice < 0.5:
            self.there = [r for r in self.there if r is not old]  # not by ==: -0.0 == 0.0
            self.add(
                "d", {**dict.fromkeys(NAMES), **{n: old[n] for n in self.known}, RAW: old[RAW]}
            )
            return
        unsent = tuple(n for n in ("weight", "a `key`.x") if rng.random() < 0.5)
        moves = self.has_key and held is None
        new = dict(row) if moves or not self.has_key else {**row, "id": old["id"], "h1": old["h1"]}
        new |= {n: old[n] for n in unsent}
        new[RAW] = dict((old if "weight" in unsent else row)[RAW])
        self.there = [r for r in self.there if r is not old] + [new]
        self.add("u", new, old if moves or not self.has_key else None, unsent)

    @property
    def known(self) -> list[str]:
        return ["id", "h1"] if self.has_key else NAMES


@pytest.mark.thorough
@pytest.mark.parametrize(("seed", "has_key"), [(1, True), (3, True), (2, False)])
def test_source_and_changes_make_what_folding_both_makes(
    spark: SparkSession, seed: int, *, has_key: bool
) -> None:
    log = Log(random.Random(seed), has_key)
    start = log.start(8)
    for _ in range(80):
        log.step()
    source = frame(spark, start, pa.schema([*COLUMNS, CDC.field(RAW)]))
    chosen = comparison(source, ("id", "h1") if has_key else ())
    noise = [  # of a table that is read again meanwhile: nothing new in it
        {**start[0], "_cdc_op": "r", "_cdc_lsn": L + 50, "_cdc_seq": 0},
        {**dict.fromkeys(NAMES), "_cdc_op": "t", "_cdc_lsn": L + 20, "_cdc_seq": -1},
    ]
    found = roll_forward(source, frame(spark, [*log.changes, *noise]), chosen)
    placed = [{**r, "_cdc_op": "r", "_cdc_lsn": L, "_cdc_seq": 0} for r in start]
    every = [{**dict.fromkeys(CDC.names), **row} for row in [*placed, *log.changes]]
    folded = fold(every, chosen.key)
    assert Counter(map(repr, map(shown, folded))) == Counter(map(repr, map(shown, log.there)))
    assert counted(found.rows) == counted(hashed(frame(spark, folded), chosen))
    found.close()


def shown(row: Row) -> list[Any]:
    return [row[RAW].get(n, row[n]) for n in NAMES]


ODD = pa.schema(
    [
        ("id", pa.int32()),
        ("f", pa.float32()),
        ("d", pa.float64()),
        ("n", pa.decimal128(20, 3)),
        ("s", pa.string()),
        ("b", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("l", pa.list_(pa.float64())),
        ("t", pa.list_(pa.string())),
        ("r", pa.struct([("x", pa.int32()), ("y", pa.list_(pa.timestamp("us")))])),
        ("_cdc_raw", pa.map_(pa.string(), pa.string())),
    ]
)
NAN = float("nan")
LOCAL = datetime(2024, 1, 1, 0, 0, 0, 1)  # noqa: DTZ001 - of no zone
DISTINCT: list[Row] = [
    {},
    {"f": 0.0},
    {"f": -0.0},
    {"f": NAN},
    {"d": 0.0},
    {"d": -0.0},
    {"d": NAN},
    {"d": 1e300},
    {"n": Decimal("1.000")},
    {"n": Decimal("1.001")},
    {"s": ""},
    {"s": "a"},
    {"s": "a "},
    {"s": "A"},
    {"b": b""},
    {"b": b"a"},
    {"day": date(1, 1, 1)},
    {"at": datetime(2024, 1, 1, 0, 0, 0, 1, UTC)},
    {"at": datetime(2024, 1, 1, 0, 0, 0, 2, UTC)},
    {"local": LOCAL},
    {"l": []},
    {"l": [None]},
    {"l": [0.0]},
    {"l": [-0.0]},
    {"l": [NAN]},
    {"l": [None, 1.0]},
    {"l": [1.0, None]},
    {"t": []},
    {"t": ["a", "b"]},
    {"t": ["ab"]},
    {"t": ["b", "a"]},
    {"t": [None, ""]},
    {"r": {"x": None, "y": None}},
    {"r": {"x": 0, "y": None}},
    {"r": {"x": None, "y": []}},
    {"r": {"x": 1, "y": [LOCAL]}},
    {RAW: [("s", "\\xff")]},
    {RAW: [("at", "infinity")]},
    {RAW: [("local", "infinity")]},
]


def test_values_that_differ_in_anything_have_other_hashes(spark: SparkSession) -> None:
    """-0, NaN, null, empty and absent are five things, in elements and fields, too."""
    rows = [{"id": 1, **row} for row in DISTINCT]
    made = from_arrow(spark, pa.Table.from_pylist(rows, ODD))
    kinds = tuple((x.name, x.dataType) for x in made.schema.fields if x.name != RAW)
    found = hashed(made, ComparedTable(kinds, ("id",), ranges=1)).select("row", "h1").collect()
    assert len({row[0] for row in found}) == len(DISTINCT)
    assert len({row[1] for row in found}) == 1
    other = [(RAW, "_cdc_before.s", "x"), (RAW, "dropped", "y")]  # not of a compared column
    same = [{"id": 1}, *({"id": 1, name: [(key, text)]} for name, key, text in other)]
    made = from_arrow(spark, pa.Table.from_pylist(same, ODD))
    found = hashed(made, ComparedTable(kinds, ("id",), ranges=1)).select("row").collect()
    assert len({row[0] for row in found}) == 1


def test_differences_name_keys_columns_and_counts(spark: SparkSession) -> None:
    def row(i: int, text: str | None, number: float | None = 1.0) -> Row:
        return {"id": i, "h1": "a", "weight": text, "a `key`.x": number}

    shape = pa.schema([*COLUMNS, CDC.field(RAW)])
    ours = frame(spark, [row(1, "x"), row(2, "y"), row(3, "z"), row(4, "same", -0.0)], shape)
    theirs = frame(
        spark, [row(1, "x", 0.0), row(3, "z"), row(3, "z"), row(4, "same", 0.0), row(5, "w")], shape
    )
    chosen = comparison(ours, with_values=True)
    a, b = hashed(ours, chosen), hashed(theirs, chosen)
    ranges = differing_ranges(sums_by_range(a), sums_by_range(b))
    found = differences(a, b, ranges, chosen).orderBy("key").collect()
    assert [(r["kind"], r["key"], r["columns"], r["count"]) for r in found] == [
        ("different", '{"id":"1","h1":"a"}', ["a `key`.x"], 1),
        ("missing", '{"id":"2","h1":"a"}', None, 1),
        ("extra", '{"id":"3","h1":"a"}', None, 1),
        ("different", '{"id":"4","h1":"a"}', ["a `key`.x"], 1),
        ("extra", '{"id":"5","h1":"a"}', None, 1),
    ]
    assert found[3]["source_values"] == {"a `key`.x": "-0.0"}
    assert found[3]["mirror_values"] == {"a `key`.x": "0.0"}
    assert found[4]["mirror_values"]["weight"] == "w"
    assert found[4]["source_values"] is None

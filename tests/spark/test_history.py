"""Histories against a plain fold, row by row, for any batches of epochs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from ingestd.lake.delta_lake import DeltaLake
from ingestd.model.changes import EpochSummary
from ingestd.model.errors import OperatorError, TableError
from ingestd.model.lake_state import TableEvent, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Column
from spark_jobs.delta_log.commits import MERGE_SETTINGS, Signature
from spark_jobs.engine.table_mover import TableStep
from spark_jobs.histories.job import HistoryJob
from spark_jobs.history import as_of, as_of_lsn
from spark_jobs.lake.source_lake import Epoch, SourceLake
from spark_jobs.lake.variants import as_texts
from tests.harness.history_logs import KeyedLog, KeylessLog, change
from tests.harness.plain_history import keyed_history, keyless_history
from tests.unit.lake.rows import AT, make_batch, make_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ingestd.model.schema import Table

    Row = dict[str, Any]

pytestmark = pytest.mark.spark_matrix
BIG = Column("big", 25, -1, pa.string(), "text")
KEYED = make_table("orders", BIG)
KEYLESS = replace(
    make_table("events", BIG), replica_identity="f", key=(), before=("id", "note", "big")
)
COLUMNS = ("id", "note", "big")


async def write(
    lake: Path, table: Table, epochs: Sequence[Sequence[Row]], *, at_lsn: int = 1
) -> list[int]:
    """Commit epochs through the real sink; return their ends. The table is so from `at_lsn`."""
    sink = DeltaLake(str(lake), "shop")
    ends = []
    low = at_lsn
    try:
        await sink.open()
        await sink.adopt("7000000000000000001")
        await sink.record([TableEvent(table, TableState.LIVE, AT, Lsn(at_lsn))])
        for rows in epochs:
            high = max([low, *(row["_cdc_lsn"] for row in rows)])
            writer = sink.begin_epoch()
            if rows:
                await writer.append_batch(make_batch(table, rows), from_snapshot=True)
                await writer.commit(EpochSummary(Lsn(low), Lsn(high + 1), AT, 1, 100))
                ends.append(high + 1)
            low = high + 1
    finally:
        await sink.close()
    return ends


@dataclass
class Job:
    """Moves one table's history, epoch by epoch or several at once."""

    spark: SparkSession
    lake: Path
    path: str
    table: str
    above: int = 0
    above_lsn: int = 0
    schema_version: int = 0
    job: HistoryJob = field(default_factory=HistoryJob)

    def move(self, epoch: int, end_lsn: int, rows: int = 0) -> None:
        lake = SourceLake(self.spark, str(self.lake), "shop")
        definition = lake.registry().at(self.table)
        assert definition is not None
        step = TableStep(
            table=self.table,
            path=self.path,
            definition=definition,
            above=self.above,
            above_lsn=self.above_lsn,
            through=Epoch(epoch, end_lsn, AT, {}),
            rows=rows,
            nbytes=0,
            schema_version=self.schema_version,
            signature=Signature("history", "shop", "a lake", epoch, definition.schema_version),
            app_id=f"ingestd-history/shop/{self.table}",
        )
        self.job.advance(lake, step)
        self.above, self.above_lsn = epoch, end_lsn
        self.schema_version = definition.schema_version

    def versions(self) -> Counter[tuple[Any, ...]]:
        found: Counter[tuple[Any, ...]] = Counter()
        for row in as_texts(self.spark.read.format("delta").load(self.path)).collect():
            raw = row["_cdc_raw"] or {}
            values = tuple(("raw", raw[n]) if n in raw else row[n] for n in COLUMNS)
            ends = None
            if not row["is_current"]:
                ends = (row["valid_to_lsn"], row["valid_to_seq"])
                assert micros(row["valid_to"]) == ends[0]
            assert micros(row["valid_from"]) == row["valid_from_lsn"]
            unknown = tuple(sorted(row["_cdc_unchanged"] or ()))
            begin = (row["valid_from_lsn"], row["valid_from_seq"])
            found[(*values, row["operation"], begin, ends, unknown)] += 1
        return found


def micros(at: datetime) -> int:
    """What `history_logs.change` made a time of: the LSN."""
    return (at.astimezone(UTC) - AT) // timedelta(microseconds=1)


def plain(epochs: Iterable[Sequence[Row]], fold: Any) -> Counter[tuple[Any, ...]]:
    rows = [row for epoch in epochs for row in epoch]
    return Counter(v.as_tuple(COLUMNS) for v in fold(rows))


def fold_keyed(rows: Sequence[Row]) -> Any:
    return keyed_history(rows, COLUMNS, ("id",))


def fold_keyless(rows: Sequence[Row]) -> Any:
    return keyless_history(rows, COLUMNS)


def assert_same(found: Counter[tuple[Any, ...]], wanted: Counter[tuple[Any, ...]]) -> None:
    lacking = sorted((wanted - found).elements(), key=str)
    surplus = sorted((found - wanted).elements(), key=str)
    assert (lacking, surplus) == ([], []), f"lacking {lacking}\nsurplus {surplus}"


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    """As the job's own; for few rows, whose plans are not worth being compiled."""
    made = spark.newSession()
    few = {"spark.sql.shuffle.partitions": "1", "spark.sql.codegen.wholeStage": "false"}
    for name, value in {**MERGE_SETTINGS, **few}.items():
        made.conf.set(name, value)
    return made


@pytest.mark.spark_few
@pytest.mark.parametrize("moves", [(5, 11), pytest.param((5, 10, 11), marks=pytest.mark.thorough)])
async def test_a_keyed_history_is_that_of_its_changes(
    session: SparkSession, lake: Path, tmp_path: Path, moves: tuple[int, ...]
) -> None:
    """Late reads and `t`s, key changes, unsent values, truncates, in batches of epochs.

    The second begins with what was read late and has its `t`; a third has only a late `t`.
    """
    rng = random.Random(1)
    log = KeyedLog(rng, keys=30)
    log.first_load()
    log.transaction()
    log.close()
    for _ in range(60):
        log.transaction()
    log.close()
    log.read_anew(transactions=6, with_marker=True)
    log.transaction(is_lost=True)
    log.read_anew(transactions=6)
    log.epochs = [epoch for epoch in log.epochs if epoch]
    ends = await write(lake, KEYED, log.epochs)
    job = Job(session, lake, str(tmp_path / "history"), "public.orders")
    assert len(ends) == 11
    for epoch in moves:
        job.move(epoch, ends[epoch - 1])
        assert_same(job.versions(), plain(log.epochs[:epoch], fold_keyed))


@pytest.mark.thorough
async def test_a_keyless_history_is_that_of_its_changes(
    session: SparkSession, lake: Path, tmp_path: Path
) -> None:
    """In batches of epochs: the second has nothing late, the last has snapshots that came late."""
    rng = random.Random(1)
    log = KeylessLog(rng)
    for _ in range(3):
        log.transaction(is_lost=True)
    log.read()
    for late in (0, 3, 2):
        for _ in range(5):
            log.transaction()
        log.close()
        log.transaction(is_lost=late == 3)
        log.read(late=late)
    log.transaction()
    log.close()
    log.epochs = [epoch for epoch in log.epochs if epoch]
    ends = await write(lake, KEYLESS, log.epochs)
    job = Job(session, lake, str(tmp_path / "history"), "public.events")
    assert len(ends) == 6
    for epoch in (1, 3, 6):
        job.move(epoch, ends[epoch - 1])
        assert_same(job.versions(), plain(log.epochs[:epoch], fold_keyless))


@pytest.mark.thorough
async def test_a_column_that_is_added_is_in_what_was_there_then(
    session: SparkSession, lake: Path, tmp_path: Path
) -> None:
    """With the constant that such rows have in the source; what had ended does not have it.

    Also if the epoch before ended above the position of the new column, a deletion below it comes
    late, and a run was killed when it had added the column.
    """
    rows = [change("c", 100, seq, {"id": seq, "note": "old"}) for seq in (1, 2, 3, 4)]
    gone = change("d", 110, 1, {"id": 3, "note": None})
    old = make_table("grown")
    await write(lake, old, [[*rows, gone]])
    job = Job(session, lake, str(tmp_path / "history" / "public" / "grown"), "public.grown")
    job.move(1, 205)
    state = Column("a state", 25, -1, pa.string(), "text", missing="open")
    grown = make_table("grown", state)
    late = change("d", 150, 1, {"id": 4, "note": None})
    shut = change("u", 210, 1, {"id": 1, "a state": "shut"})
    await write(lake, grown, [[late, shut]], at_lsn=200)
    table = f"delta.`{job.path}`"
    session.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    session.sql(f"ALTER TABLE {table} ADD COLUMNS (`a state` string)")
    job.move(2, 211, rows=2)
    found = session.read.format("delta").load(job.path)
    columns = ["id", "note", "operation", "a state", "valid_to_lsn"]
    assert sorted((tuple(row) for row in found.select(columns).collect()), key=str) == [
        (1, "old", "c", "open", 210),
        (1, None, "u", "shut", None),
        (2, "old", "c", "open", None),
        (3, "old", "c", None, 110),
        (3, None, "d", None, 110),
        (4, "old", "c", None, 150),
        (4, None, "d", None, 150),
    ]
    with pytest.raises(TableError, match=r"1 rows of epochs 3 to 3 are missing"):
        job.move(3, 300, rows=1)


async def test_a_column_added_and_dropped_has_values_for_its_lifetime(
    session: SparkSession, lake: Path, tmp_path: Path
) -> None:
    """With the default that such rows had, also as a text; all before the history began."""
    day = Column("day", 1082, -1, pa.date32(), "date", missing="infinity")
    size = Column("size", 23, -1, pa.int32(), "integer", missing="5")
    other = Column("size", 25, -1, pa.string(), "text", stored_as="size__v2")
    first = [change("c", 100, seq, {"id": seq, "note": "x"}) for seq in (1, 2, 3)]
    await write(lake, make_table("fleeting"), [[*first, change("d", 110, 1, {"id": 3})]])
    changed = change("u", 210, 1, {"id": 1, "note": "y", "day": None, "size": 6})
    await write(lake, make_table("fleeting", day, size), [[changed]], at_lsn=200)
    changed = change("u", 310, 1, {"id": 1, "note": "z", "size__v2": "7"})
    await write(lake, make_table("fleeting", other), [[changed]], at_lsn=300)
    job = Job(session, lake, str(tmp_path / "history"), "public.fleeting")
    job.move(3, 311, rows=6)
    found = session.read.format("delta").load(job.path).where("operation != 'd'")
    columns = ["id", "note", "size", "size__v2", "_cdc_raw['day']", "valid_to_lsn"]
    assert sorted((tuple(row) for row in found.selectExpr(*columns).collect()), key=str) == [
        (1, "x", 5, None, "infinity", 210),
        (1, "y", 6, None, None, 310),
        (1, "z", None, "7", None, None),
        (2, "x", 5, None, "infinity", None),
        (3, "x", None, None, None, 110),
    ]


@pytest.mark.thorough
async def test_a_row_without_a_key_is_found_by_what_a_new_column_has(
    session: SparkSession, lake: Path, tmp_path: Path
) -> None:
    """Old rows have its constant once it exists, and lack it before."""
    a, b, c = ({"id": number, "note": None} for number in (1, 2, 3))
    read = [change("t", 100, -1, {}), *(change("r", 100, 0, row) for row in (a, a, b, c))]
    early = change("d", 110, 1, b, before=b)
    plain_table = replace(make_table("bare"), replica_identity="f", key=(), before=("id", "note"))
    await write(lake, plain_table, [[*read, early]])
    n = Column("n", 23, -1, pa.int32(), "integer", missing="5")
    grown = replace(make_table("bare", n), replica_identity="f", key=(), before=("id", "note", "n"))
    a, c = {**a, "n": 5}, {**c, "n": 5}
    gone = change("d", 210, 1, a, before=a)
    changed = change("u", 220, 1, {**c, "n": 6}, before=c)
    await write(lake, grown, [[gone, changed]], at_lsn=200)
    job = Job(session, lake, str(tmp_path / "history"), "public.bare")
    job.move(2, 221)
    found = session.read.format("delta").load(job.path).select("id", "n", "valid_to_lsn")
    assert sorted((tuple(row) for row in found.collect()), key=str) == [
        (1, 5, 210),
        (1, 5, None),
        (2, None, 110),
        (3, 5, 220),
        (3, 6, None),
    ]


async def test_a_key_stored_out_of_line_and_a_changed_identity(
    session: SparkSession, lake: Path, tmp_path: Path
) -> None:
    """The server sends the first in the old row alone; by the other, older changes name no row."""
    named = make_table("named")
    columns = tuple(replace(c, identity=c.name == "note") for c in named.columns)
    named = replace(named, columns=columns, key=("note",), before=("note",))
    rows = [change("c", 100, seq, {"id": seq, "note": "ab"[seq - 1]}) for seq in (1, 2)]
    for number, (name, lsn) in enumerate([("a", 110), ("b", 120), ("a", 130)]):
        update = change("u", lsn, 1, {"id": 10 + number}, before={"note": name})
        rows.append({**update, "_cdc_unchanged": ["note"]})
    rows.append(change("d", 140, 1, {"note": "b"}))
    await write(lake, named, [rows])
    job = Job(session, lake, str(tmp_path / "history"), "public.named")
    job.move(1, 141)
    found = session.read.format("delta").load(job.path)
    assert found.where("_cdc_unchanged IS NOT NULL").isEmpty()
    names = ["note", "id", "operation", "valid_to_lsn"]
    assert sorted((tuple(row) for row in found.select(names).collect()), key=str) == [
        ("a", 1, "c", 110),
        ("a", 10, "u", 130),
        ("a", 12, "u", None),
        ("b", 11, "u", 140),
        ("b", 2, "c", 120),
        ("b", None, "d", 140),
    ]
    await write(lake, make_table("named"), [[change("d", 150, 1, {"note": "a"})]], at_lsn=160)
    with pytest.raises(TableError, match="replica identity changed at 160"):
        job.move(2, 161, rows=1)


@pytest.mark.thorough
async def test_as_of_goes_by_the_log_not_by_the_clock(
    session: SparkSession, lake: Path, tmp_path: Path
) -> None:
    """Also where the source's own column is called as one of the history's."""
    named = make_table("prices", Column("valid_from", 25, -1, pa.string(), "text"))
    values = {"note": None, "valid_from": "spring"}
    rows = [change("c", lsn, 1, {"id": lsn, **values}) for lsn in (100, 110, 120)]
    rows[1]["_cdc_ts"] = AT + timedelta(microseconds=90)  # the clock was set back
    await write(lake, named, [rows])
    target = tmp_path / "history"
    Job(session, lake, str(target / "public" / "prices"), "public.prices").move(1, 121)

    def ids(found: Any) -> list[int]:
        return sorted(row["id"] for row in found.where("valid_from = 'spring'").collect())

    at = AT + timedelta(microseconds=95)
    assert ids(as_of(session, str(target), "public.prices", at)) == [100, 110]
    assert ids(as_of_lsn(session, str(target), "public.prices", 119)) == [100, 110]
    assert ids(as_of_lsn(session, str(target), "public.prices", "0/78")) == [100, 110, 120]
    assert ids(as_of(session, str(target), "public.prices", AT)) == []
    with pytest.raises(OperatorError, match="not an LSN"):
        as_of_lsn(session, str(target), "public.prices", "78")
    with pytest.raises(OperatorError, match=r"no history of public\.prices exists"):
        as_of_lsn(session, f"{lake}/shop", "public.prices", 119)


@pytest.mark.thorough
@pytest.mark.parametrize("moves", [(1, 3, 4), pytest.param((4,), marks=pytest.mark.thorough)])
async def test_where_a_column_is_recreated_rows_end_and_continue(
    session: SparkSession, lake: Path, tmp_path: Path, moves: tuple[int, ...]
) -> None:
    """With the new DEFAULT; before that it stays what it was. Changes below it come late."""
    day, size = Column("day", 1082, -1, pa.date32(), "date"), Column("size", 23, -1, pa.int32())
    rows = [change("c", 100, n, {"id": n, "note": "x", "size": n}) for n in (1, 2, 3, 4)]
    rows.append(change("d", 110, 1, {"id": 3}))
    infinite = [{**row, "_cdc_raw": [("day", "infinity")]} for row in rows]
    await write(lake, make_table("again", day, size), [infinite])
    await write(lake, make_table("again"), [[change("u", 130, 1, {"id": 2})]], at_lsn=120)
    anew = make_table("again", replace(day, missing="2024-02-29"), replace(size, missing="5"))
    changed = change("u", 210, 1, {"id": 1, "note": "y", "size": 7})
    late = change("d", 150, 1, {"id": 4})
    ends = [111, 131, *await write(lake, anew, [[late, changed]], at_lsn=200)]
    later = change("d", 220, 1, {"id": 1})
    late = change("u", 190, 1, {"id": 2, "note": "late"})
    ends += await write(lake, anew, [[late, later]], at_lsn=212)
    job = Job(session, lake, str(tmp_path / "history"), "public.again")
    for epoch in moves:
        job.move(epoch, ends[epoch - 1])
    found = session.read.format("delta").load(job.path).where("operation != 'd'")
    columns = ("id", "size", "coalesce(string(day), _cdc_raw['day'])", "note", "operation")
    places = ("valid_from_lsn", "valid_from_seq", "valid_to_lsn", "valid_to_seq")
    versions = map(tuple, found.selectExpr(*columns, *places).collect())
    assert sorted(versions, key=str) == [
        (1, 1, "infinity", "x", "c", 100, 1, 200, 0),
        (1, 5, "2024-02-29", "x", "u", 200, 0, 210, 1),
        (1, 7, None, "y", "u", 210, 1, 220, 1),
        (2, 2, "infinity", "x", "c", 100, 2, 130, 1),
        (2, 5, "2024-02-29", "late", "u", 200, 0, None, None),
        (2, None, None, "late", "u", 190, 1, 200, 0),
        (2, None, None, None, "u", 130, 1, 190, 1),
        (3, 3, "infinity", "x", "c", 100, 3, 110, 1),
        (4, 4, "infinity", "x", "c", 100, 4, 150, 1),
    ]


@pytest.mark.thorough
async def test_equal_rows_continue_where_a_column_is_recreated(
    session: SparkSession, lake: Path, tmp_path: Path
) -> None:
    """Without a key, each copy; and a re-read one stays as it is."""

    def bare(*columns: Column) -> Table:
        before = ("id", "note", *(c.name for c in columns))
        return replace(make_table("bare", *columns), replica_identity="f", key=(), before=before)

    n = Column("n", 23, -1, pa.int32(), "integer")
    a, b = {"id": 1, "note": None, "n": 1}, {"id": 2, "note": None, "n": 2}
    read = [change("t", 100, -1, {}), *(change("r", 100, 0, row) for row in (a, a, b))]
    await write(lake, bare(n), [read])
    await write(lake, bare(), [[change("c", 130, 1, {"id": 3})]], at_lsn=120)
    a, b = {**a, "n": 5}, {**b, "n": 5}
    ends = await write(
        lake, bare(replace(n, missing="5")), [[change("d", 210, 1, a, before=a)]], at_lsn=200
    )
    again = [change("t", 300, -1, {}), *(change("r", 300, 0, row) for row in (a, {**b, "n": 6}))]
    ends += await write(lake, bare(replace(n, missing="5")), [again], at_lsn=212)
    job = Job(session, lake, str(tmp_path / "history"), "public.bare")
    for epoch, end in ((1, 101), (3, ends[0]), (4, ends[1])):
        job.move(epoch, end)
    columns = ("id", "n", "operation", "valid_from_lsn", "valid_to_lsn")
    found = session.read.format("delta").load(job.path).select(*columns)
    assert sorted((tuple(row) for row in found.collect()), key=str) == [
        (1, 1, "r", 100, 200),
        (1, 1, "r", 100, 200),
        (1, 5, "u", 200, 210),
        (1, 5, "u", 200, None),
        (2, 2, "r", 100, 200),
        (2, 5, "u", 200, 300),
        (2, 6, "r", 300, None),
        (3, 5, "u", 200, 300),
        (3, None, "c", 130, 200),
    ]


@pytest.mark.thorough
async def test_it_begins_only_where_no_needed_rows_are_missing(
    session: SparkSession, lake: Path, tmp_path: Path
) -> None:
    """Rows below the newest snapshot do not count; later ones do."""
    t, rows = make_table("short"), [{"id": seq, "note": None} for seq in (1, 2)]
    read = [change("t", 100, -1, {}), *(change("r", 100, 0, row) for row in rows)]
    await write(lake, t, [read, [change("c", 110, 1, {"id": 3})]])
    raw = DeltaTable(f"{lake}/shop/public/short")
    raw.delete("_cdc_lsn = 110")
    job = Job(session, lake, str(tmp_path / "history"), "public.short")
    with pytest.raises(TableError, match="rows of epoch 2 are missing"):
        job.move(2, 111, rows=4)
    raw.delete()
    with pytest.raises(TableError, match="all 4 rows of epochs 1 to 2 are missing"):
        job.move(2, 111, rows=4)
    (lake / "shop/public/short").rename(tmp_path / "away")
    again = [change("t", 120, -1, {}), *(change("r", 120, 0, row) for row in rows)]
    await write(lake, t, [again], at_lsn=120)
    job.move(3, 121, rows=3)
    assert session.read.format("delta").load(job.path).where("is_current").count() == len(rows)


async def test_late_rows_are_refused_where_later_rows_are_missing(
    session: SparkSession, lake: Path, tmp_path: Path
) -> None:
    """They would have to be processed again."""
    t = make_table("late")
    first = [change("t", 100, -1, {}), change("r", 100, 0, {"id": 1, "note": "old"})]
    later = [change("u", 120, 1, {"id": 1, "note": "new"})]
    late = [change("r", 110, 0, {"id": 1, "note": "old"})]
    await write(lake, t, [first, later])
    job = Job(session, lake, str(tmp_path / "history"), "public.late")
    job.move(2, 121, rows=3)
    await write(lake, t, [late], at_lsn=130)
    DeltaTable(f"{lake}/shop/public/late").delete("_cdc_lsn = 120")
    with pytest.raises(TableError, match="rows of epoch 2 are missing"):
        job.move(3, 131, rows=1)

"""A session's own settings change no result of a job, and the job changes none of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ, Column, Table, TableId
from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.oracle.comparison import await_caught_up
from spark_jobs import history, mirror, reconcile
from spark_jobs.delta_log.commits import OF_A_COMMIT, settings
from spark_jobs.lake.exchange import to_rows
from spark_jobs.lake.targets import HISTORIES, MIRRORS, table_path
from spark_jobs.mirrors.job import MirrorJob
from spark_jobs.mirrors.policy import MirrorPolicy
from spark_jobs.own_session import VALUE_SETTINGS, derived_session
from tests.harness.config import wal_config
from tests.harness.databases import Database, fresh_database
from tests.harness.plain_delta import read_delta
from tests.harness.plain_mirror import write_mirrors
from tests.harness.raw_lake import RawLake
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ingestd.testing.embedded.postgres import PostgresServer

ZONE = "Australia/Lord_Howe"
"""Half an hour off in winter: 10:30 and 11:00. On 2026-04-05 its clock goes back at 2:00."""
TWICE = datetime(2026, 4, 4, 15, 0, tzinfo=UTC)
"""01:45 there, as half an hour before and half an hour after."""
SINGLE: Mapping[str, Mapping[str, str]] = {
    "no ANSI": {"spark.sql.ansi.enabled": "false"},
    "ANSI": {"spark.sql.ansi.enabled": "true"},
    "zone": {"spark.sql.session.timeZone": ZONE},
    "case": {"spark.sql.caseSensitive": "true"},
    "AQE": {"spark.sql.adaptive.enabled": "true"},
    "no AQE": {"spark.sql.adaptive.enabled": "false"},
    "one partition": {"spark.sql.shuffle.partitions": "1"},
    "200 partitions": {"spark.sql.shuffle.partitions": "200"},
    "legacy times": {
        "spark.sql.legacy.timeParserPolicy": "LEGACY",
        "spark.sql.timestampType": "TIMESTAMP_NTZ",
    },
    "legacy files": {name: "LEGACY" for name in VALUE_SETTINGS if "Rebase" in name},
    "legacy texts": {
        "spark.sql.parser.escapedStringLiterals": "true",
        "spark.sql.parser.quotedRegexColumnNames": "true",
        "spark.sql.parquet.binaryAsString": "true",
        "spark.sql.storeAssignmentPolicy": "LEGACY",
    },
    "a commit's": dict(zip(OF_A_COMMIT, ("mine", "app", str(1 << 40)), strict=True)),
    "catalog": {
        "spark.sql.catalog.mine": "org.example.Catalog",
        "spark.sql.defaultCatalog": "mine",
        "spark.example.secret": "x",
    },
}
ALL = {name: value for one in SINGLE.values() for name, value in one.items()} | {
    "spark.sql.ansi.enabled": "false",
    "spark.sql.shuffle.partitions": "7",
    "spark.sql.adaptive.enabled": "true",
}
"""All at once; where two exclude each other, what is not the tests' default."""
CASES = [
    pytest.param(ALL, id="all", marks=pytest.mark.spark_matrix),
    *(pytest.param(v, id=k, marks=pytest.mark.long) for k, v in SINGLE.items()),
]
ORDERS = Table(
    TableId("public", "orders"),
    1,
    (
        Column("id", 20, -1, pa.int64(), "bigint", identity=True),
        Column("Note", 25, -1, pa.string(), "text"),
        Column("at", 1184, -1, TIMESTAMP, "timestamp with time zone"),
        Column("local", 1114, -1, TIMESTAMP_NTZ, "timestamp"),
        Column("day", 1082, -1, pa.date32(), "date"),
        Column("price", 1700, (12 << 16 | 2) + 4, pa.decimal128(12, 2), "numeric(12,2)"),
    ),
    "d",
    ("id",),
    ("id",),
)
OLD = datetime(1500, 3, 1, 12, tzinfo=UTC)


class LakeOfOneTime(RawLake):
    """All that is committed, is at TWICE."""

    def at(self) -> datetime:
        return TWICE


@dataclass
class Workload:
    """Two epochs of a table: rows, then a key change without the text, an update and a delete."""

    raw: RawLake

    def begin(self) -> None:
        rows = [
            row(n, f"nöte {n} '\\n", TWICE + n * timedelta(minutes=30), Decimal("9999999999.99"))
            for n in range(3)
        ]
        rows.append(row(3, None, OLD, Decimal("-0.01")))
        self._commit("c", rows)
        self.raw.record("live", ORDERS)

    def go_on(self) -> None:
        moved = row(10, None, TWICE, Decimal(1)) | {
            "_cdc_unchanged": ["Note"],
            "_cdc_before": {"id": 0},
        }
        self._commit("u", [moved, row(1, "new", OLD, None)])
        self._commit("d", [{"id": 2}])

    def _commit(self, op: str, rows: list[dict[str, Any]]) -> None:
        lsn = self.raw.next_lsn()
        changes = [
            {**one, "_cdc_op": op, "_cdc_lsn": lsn, "_cdc_seq": n, "_cdc_ts": TWICE}
            for n, one in enumerate(rows, 1)
        ]
        self.raw.commit({ORDERS: changes})


def row(key: int, note: str | None, at: datetime, price: Decimal | None) -> dict[str, Any]:
    local, day = at.replace(tzinfo=None), at.date() if at != OLD else date(1, 1, 1)
    return {"id": key, "Note": note, "at": at, "local": local, "day": day, "price": price}


BY_SPARK = MirrorPolicy(few_rows=-1, driver_rows=-1, small_bytes=0, changed_share=0)
WAYS: Mapping[str, tuple[MirrorPolicy, list[str]]] = {
    "rows by Spark": (BY_SPARK, []),
    "all by Spark": (BY_SPARK, ["--no-accelerator"]),
    "by the driver": (MirrorPolicy(), []),
}


def results(folder: Path, way: str) -> dict[str, Any]:
    """Return the rows of mirror and history after two runs, read without Spark, and the cut."""
    raw = LakeOfOneTime(folder / "lake")
    work = Workload(raw)
    target = {job: str(folder / job) for job in ("mirror", "history")}
    given = ["--lake", str(raw.uri), "--source", raw.source, "--once"]
    policy, more = WAYS[way]
    given += more
    job = MirrorJob(policy=policy)
    for step in (work.begin, work.go_on):
        step()
        assert mirror.main([*given, "--target", target["mirror"]], job=job) == 0
        assert history.main([*given, "--target", target["history"]]) == 0
    found: dict[str, Any] = {}
    for name, log in (("mirror", MIRRORS), ("history", HISTORIES)):
        rows = newest_rows(Path(table_path(target[name], str(ORDERS.id))))
        found[name] = sorted(rows, key=lambda one: json.dumps(one, default=str, sort_keys=True))
        cuts = newest_rows(Path(target[name]) / log)
        found[log] = sorted((c["epoch"], utc_of(c["last_commit_ts"])) for c in cuts)
    return found


def utc_of(at: datetime) -> datetime:
    return at.replace(tzinfo=UTC)


def newest_rows(path: Path) -> list[dict[str, Any]]:
    log = path / "_delta_log"
    return read_delta(path, max(int(file.stem) for file in log.glob("[0-9]*.json")))


def of(session: SparkSession) -> dict[str, str]:
    return {one["key"]: one["value"] for one in session.sql("SET").collect()}


@pytest.fixture(
    scope="module",
    params=[
        "rows by Spark",
        pytest.param("all by Spark", marks=pytest.mark.thorough),
        pytest.param("by the driver", marks=pytest.mark.thorough),
    ],
)
def plain(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    """Return a way of mirroring, and its results under the tests' own settings."""
    del spark
    return request.param, results(tmp_path_factory.mktemp("plain"), request.param)


@pytest.mark.parametrize("changed", CASES)
def test_results_and_settings_stay_what_they_are(
    spark: SparkSession,
    tmp_path: Path,
    plain: tuple[str, dict[str, Any]],
    changed: Mapping[str, str],
) -> None:
    way, expected = plain
    assert [len(expected[name]) for name in ("mirror", "history", MIRRORS)] == [3, 7, 2]
    with settings(spark, changed):
        before = of(spark)
        found = results(tmp_path, way)
        assert of(spark) == before
        assert of(type(spark).active()) == before
    assert found == expected
    assert found[MIRRORS][-1][1] == found[HISTORIES][-1][1] == TWICE


LIMIT_S = 90.0
ORDERS_OF_SOURCE = (
    'CREATE TABLE orders (id bigint PRIMARY KEY, "Note" text, at timestamptz, local timestamp,'
    " day date, price numeric(30, 10), n float8, b bytea)"
)
ROWS_OF_SOURCE = """
INSERT INTO orders SELECT i, 'nöte ' || i || ' ''\\n',
  timestamptz '2026-04-04 15:00+00' + i * interval '30 minutes', '1500-03-01 12:00', '0001-01-01',
  0.0000000001, '-0', '\\x00ff' FROM generate_series(0, 5) i"""
MEANWHILE = (
    "UPDATE orders SET at = at",
    "INSERT INTO orders VALUES (50, 'x', '1500-03-01', '1500-03-01', '1500-03-01', 1, 'NaN', '')",
    "DELETE FROM orders WHERE id = 50",
)
BY_HAND = (
    ("id = 0", {"at": "at + interval '30 minutes'"}),
    ("id = 1", {"day": "date '0001-01-03'", "local": "local + interval '1 hour'"}),
    ("id = 2", {"price": "price + price", '"Note"': "'nöte'"}),
    ("id = 3", {"n": "0.0", "b": "NULL"}),
    ("id = 4", {"id": "40"}),
)
"""Condition and values of rows of the mirror."""
DIFFERENCES = {
    ("different", '{"id":"0"}'): {"at": "2026-04-04 15:30:00"},
    ("different", '{"id":"1"}'): {"local": "1500-03-01 13:00:00", "day": "0001-01-03"},
    ("different", '{"id":"2"}'): {"Note": "nöte", "price": "0.0000000002"},
    ("different", '{"id":"3"}'): {"n": "0.0", "b": None},
    ("extra", '{"id":"40"}'): None,
    ("missing", '{"id":"4"}'): None,
}
"""Kind and key to the mirror's values of the columns that differ."""


@dataclass(frozen=True)
class Source:
    """A table and a daemon that captures it."""

    database: Database
    daemon: Daemon
    lake: Path

    def reconcile(self, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Compare a mirror that is ahead of the compared position and was changed by hand.

        Return the report's rows without what differs from run to run.
        """
        target, report = folder / "mirror", folder / "report"
        await_until(lambda: not self.positions(), LIMIT_S, "the end of the earlier comparison")
        began = datetime.now(UTC)
        given = ["--config", str(self.daemon.config_path), "--source", "shop", "--values"]
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(self.mirror_ahead, target)
            assert reconcile.main([*given, "--target", str(target), "--report", str(report)]) == 1
            ahead.result()
        found = {name: newest_rows(report / name) for name in ("tables", "differences")}
        for rows in found.values():
            rows.sort(key=lambda one: str((one.get("kind"), one.get("key"))))
            for one in rows:
                assert began <= utc_of(one.pop("at")) <= datetime.now(UTC)
                for name in ("run", "lsn", "epoch", "mirror_version"):
                    one.pop(name, None)
        return found

    def positions(self) -> list[str | None]:
        """Return the positions of temporary slots: comparisons have one. None: not known yet."""
        query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE temporary"
        with self.database.connect() as connection:
            return [row[0] for row in connection.execute(query)]

    def mirror_ahead(self, target: Path) -> None:
        """Once the compared position is known, make a mirror beyond it, and change that by hand."""
        await_until(lambda: any(self.positions()), LIMIT_S, "the position of the comparison")
        self.database.execute(*MEANWHILE)
        with self.database.connect() as connection:
            await_caught_up(connection, self.database.name, LIMIT_S)
        write_mirrors(self.lake, "shop", target)
        mirror = DeltaTable(table_path(str(target), "public.orders"))
        for where, values in BY_HAND:
            mirror.update(values, predicate=where)


@pytest.fixture(scope="module")
def source(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    folder = tmp_path_factory.mktemp("source")
    with fresh_database(postgres) as database:
        database.execute(ORDERS_OF_SOURCE, ROWS_OF_SOURCE)
        extra = f'slot = "{database.name}"\npublication = "{database.name}"'
        config = wal_config(lake=folder / "lake", dsn=database.dsn, source_extra=extra)
        with Daemon(folder / "daemon", config) as daemon:
            daemon.await_ready(LIMIT_S)
            yield Source(database, daemon, folder / "lake")


@pytest.fixture(scope="module")
def compared(
    spark: SparkSession, source: Source, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Return what a comparison reports under the tests' own settings."""
    del spark
    return source.reconcile(tmp_path_factory.mktemp("compared"))


@pytest.mark.parametrize("changed", CASES)
def test_a_comparison_and_settings_stay_what_they_are(
    spark: SparkSession,
    tmp_path: Path,
    source: Source,
    compared: dict[str, list[dict[str, Any]]],
    changed: Mapping[str, str],
) -> None:
    """Neither rows that changed meanwhile nor those changed by hand are taken for the other."""
    found = {(d["kind"], d["key"]): d["mirror_values"] for d in compared["differences"]}
    assert found.keys() == DIFFERENCES.keys()
    for each, values in DIFFERENCES.items():
        assert values is None or dict(found[each]) == values
    [table] = compared["tables"]
    assert (table["state"], table["source_rows"], table["changes"]) == ("different", 6, 8)
    with settings(spark, changed):
        before = of(spark)
        again = source.reconcile(tmp_path)
        assert of(spark) == before
        assert of(type(spark).active()) == before
    assert again == compared


@pytest.mark.spark_matrix
def test_a_jobs_session_has_the_givens_settings_but_for_values(spark: SparkSession) -> None:
    with settings(spark, ALL):
        own = derived_session(spark, {"spark.sql.shuffle.partitions": "3"})
        before = of(spark)
    found = of(own)
    assert {name: found.get(name) for name in VALUE_SETTINGS} == VALUE_SETTINGS
    assert not set(OF_A_COMMIT) & set(found)
    assert own.conf.get("spark.example.secret") == "x"  # (SET hides it)
    assert found["spark.sql.shuffle.partitions"] == "3"
    decided = {*VALUE_SETTINGS, *OF_A_COMMIT, "spark.sql.ansi.enabled"}
    decided.add("spark.sql.shuffle.partitions")
    rest = {name: value for name, value in before.items() if name not in decided}
    assert {name: found.get(name) for name in rest} == rest


@contextmanager
def process_zone(zone: str) -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = zone
    time.tzset()
    try:
        yield
    finally:
        if before is None:
            del os.environ["TZ"]
        else:
            os.environ["TZ"] = before
        time.tzset()


@pytest.mark.spark_matrix
def test_times_are_exact_when_a_clock_goes_back(spark: SparkSession) -> None:
    """Both half hours have the same local time in Python's zone, and nothing else tells them."""
    times = [TWICE - timedelta(minutes=15), TWICE + timedelta(minutes=15), OLD, None]
    micros = ", ".join("NULL" if t is None else str(int(t.timestamp() * 1e6)) for t in times)
    rows = spark.sql(
        f"SELECT timestamp_micros(x) AS `a.t` FROM (SELECT explode(array({micros})) AS x)"
    )
    with process_zone(ZONE):
        naive = [one[0] for one in rows.collect()]
        assert naive[0] == naive[1]
        assert [one["a.t"] for one in to_rows(rows)] == times

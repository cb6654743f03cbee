"""Mirrors held against their source: no false alarm, no difference missed."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from ingestd.model.errors import ConfigError, TransientError
from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.oracle.comparison import await_caught_up
from spark_jobs import mirror, reconcile
from spark_jobs.cli.arguments import require_config
from spark_jobs.lake.targets import table_path
from spark_jobs.reconciling.report import ReconcileState, TableResult
from spark_jobs.reconciling.run import compare
from tests.harness.compare import registry
from tests.harness.config import wal_config
from tests.harness.plain_mirror import write_mirrors
from tests.harness.types import BUILT_IN
from tests.harness.user_types import SETUP
from tests.harness.waiting import await_until
from tests.harness.wide_tables import Wide, array_columns_of, columns_of
from tests.harness.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 90.0
Row = dict[str, Any]


@dataclass
class Shop:
    """A source, its daemon, its lake and its mirrors."""

    spark: SparkSession
    database: Database
    daemon: Daemon
    lake: Path
    target: Path

    def arguments(self, *more: str) -> list[str]:
        config = str(self.daemon.config_path)
        return ["--config", config, "--source", "shop", "--target", str(self.target), *more]

    def reconcile(self, *more: str) -> int:
        return reconcile.main(self.arguments("--wait", "90s", *more))

    def results(self, *more: str) -> dict[str, TableResult]:
        chosen = reconcile.parser().parse_args(self.arguments("--wait", "90s", *more))
        _, found = compare(self.spark, require_config(chosen), chosen)
        return {result.table: result for result in found}

    def catch_up(self) -> None:
        with self.database.connect() as connection:
            await_caught_up(connection, self.database.name, LIMIT_S)
        write_mirrors(self.lake, "shop", self.target)

    def alter(self, table: str, change: Callable[[list[Row]], list[Row]]) -> None:
        """Change a mirror by hand."""
        path = table_path(str(self.target), table)
        found = DeltaTable(path).to_pyarrow_table()
        rows = pa.Table.from_pylist(change(found.to_pylist()), found.schema)
        write_deltalake(path, rows, mode="overwrite")

    def differences(self, report: Path) -> list[dict[str, Any]]:
        rows = self.spark.read.format("delta").load(f"{report}/differences").collect()
        return sorted((r.asDict(recursive=True) for r in rows), key=lambda r: r["table"])

    @contextmanager
    def mirroring(self) -> Iterator[None]:
        """Keep the mirrors up, over and over, meanwhile."""
        stop, failures = threading.Event(), list[BaseException]()

        def work() -> None:
            try:
                while not stop.wait(2.0):
                    write_mirrors(self.lake, "shop", self.target)
            except BaseException as error:  # noqa: BLE001 - the test raises it
                failures.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if failures:
            raise failures[0]


@pytest.fixture
def make_shop(
    spark: SparkSession, database: Database, lake: Path, tmp_path: Path, make_daemon: MakeDaemon
) -> Any:
    def make(tables: tuple[str, ...] = ("public.*",), more: str = "", extra: str = "") -> Shop:
        text = wal_config(
            lake=lake,
            dsn=database.dsn,
            tables=tables,
            max_delay="1s",
            source_extra=f'slot = "{database.name}"\npublication = "{database.name}"\n'
            f'discover_interval = "500ms"\n{more}',
            extra=extra,
        )
        daemon = make_daemon(text)
        daemon.start_ready(LIMIT_S)
        return Shop(spark, database, daemon, lake, tmp_path / "mirror")

    return make


WORKLOAD = ("public.accounts", "public.documents", "public.ticks")
TICKS = """
CREATE FUNCTION tick() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF TG_OP = 'INSERT' THEN INSERT INTO ticks VALUES (left(NEW.owner, 2), 1.5);
  ELSIF TG_OP = 'UPDATE' THEN
    UPDATE ticks SET n = n + 1 WHERE ctid = (SELECT ctid FROM ticks LIMIT 1 FOR UPDATE SKIP LOCKED);
  ELSE DELETE FROM ticks WHERE ctid = (SELECT ctid FROM ticks LIMIT 1 FOR UPDATE SKIP LOCKED);
  END IF; RETURN NULL; END $$"""


@pytest.mark.spark_matrix
@pytest.mark.spark_few
def test_equal_under_writers_then_all_that_is_altered_is_named(
    workload_database: Database,
    make_shop: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rows that are only late are no difference; one row by hand is, with its key and columns."""
    workload_database.execute(
        "CREATE TABLE ticks (kind text, n float8)",
        "ALTER TABLE ticks REPLICA IDENTITY FULL",
        TICKS,
        "CREATE TRIGGER ticks AFTER INSERT OR UPDATE OR DELETE ON accounts"
        " FOR EACH ROW EXECUTE FUNCTION tick()",
    )
    shop: Shop = make_shop(WORKLOAD)
    dsn = workload_database.dsn
    with Workload(dsn, seed=7, sessions=2, transactions=60) as first:
        first.join()
    shop.catch_up()
    with (
        shop.mirroring(),
        Workload(dsn, seed=8, sessions=2, transactions=10**6, limit_s=300, pause_s=0.1),
    ):
        found = shop.results()
    assert {name: result.state for name, result in found.items()} == dict.fromkeys(
        WORKLOAD, ReconcileState.EQUAL
    ), found
    assert any(result.changes for result in found.values())

    put = "INSERT INTO documents VALUES (900, 't', 'b', 1, NULL), (901, 't', 'b', 1, '\\x00')"
    workload_database.execute(
        "INSERT INTO accounts (id, owner, rate) VALUES (900, 'x', '-0'), (901, 'y', 'NaN')",
        put,
        "INSERT INTO ticks VALUES ('zzz', 'NaN')",
    )
    shop.catch_up()
    shop.alter("public.documents", lambda rows: [r for r in rows if r["id"] != 900])
    shop.alter("public.documents", lambda rows: updated(rows, 901, title="u", scan=b"\1"))
    shop.alter("public.accounts", lambda rows: updated(rows, 900, rate=0.0))
    shop.alter("public.ticks", lambda rows: [*rows, *(r for r in rows if r["kind"] == "zzz")])
    report = tmp_path / "report"
    assert shop.reconcile("--report", str(report), "--ranges", "8") == 1
    said = capsys.readouterr().out
    named = [
        (d["table"], d["kind"], d["key"], d["columns"], d["count"])
        for d in shop.differences(report)
    ]
    assert sorted(named, key=str) == [
        ("public.accounts", "different", '{"id":"900"}', ["rate"], 1),
        ("public.documents", "different", '{"id":"901"}', ["title", "scan"], 1),
        ("public.documents", "missing", '{"id":"900"}', None, 1),
        ("public.ticks", "extra", None, None, 1),
    ], said
    assert all(d["source_values"] is None for d in shop.differences(report))
    tables = shop.spark.read.format("delta").load(f"{report}/tables").collect()
    assert {
        r["table"]: (r["state"], r["missing"] + r["extra"] + r["different"]) for r in tables
    } == {
        "public.accounts": ("different", 1),
        "public.documents": ("different", 2),
        "public.ticks": ("different", 1),
    }
    assert 'different {"id":"901"}  in title, scan' in said
    assert said.endswith("3 different\n")


def updated(rows: list[Row], id_: object, **values: object) -> list[Row]:
    return [row | values if row["id"] == id_ else row for row in rows]


NAMED = ("public.every_type", "public.nothing", "public.part", "public.people")
CONTROLLED = """\
[sources.shop.table."public.people"]
exclude_columns = ["secret"]
mask_columns = { mail = "sha256", phone = "null" }
"""


@pytest.mark.thorough
def test_types_partitions_hidden_and_changed_columns(
    database: Database, make_shop: Any, tmp_path: Path
) -> None:
    """I7: whatever a column is of, and `_cdc_raw`, is compared as it is; hidden ones stay so."""
    wide = Wide("every_type", [*columns_of(BUILT_IN[::2]), *array_columns_of(BUILT_IN[::3])])
    database.execute(
        *SETUP,
        "CREATE TABLE people (id text PRIMARY KEY, mail text, phone text, secret text)",
        "INSERT INTO people SELECT 'k' || n, n || '@x', '123', 's' FROM generate_series(1, 9) n",
        "CREATE TABLE part (id timestamp, n int, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
        "CREATE TABLE part_1 PARTITION OF part FOR VALUES FROM (MINVALUE) TO ('2024-01-01')",
        "CREATE TABLE part_2 PARTITION OF part FOR VALUES FROM ('2024-01-01') TO (MAXVALUE)",
        "INSERT INTO part VALUES ('-infinity', 1), ('2023-01-01', 2), ('infinity', 3)",
        "CREATE TABLE nothing (id int PRIMARY KEY)",
    )
    wide.create(database)
    shop: Shop = make_shop(NAMED, 'mask_key = "k"', CONTROLLED)
    database.execute(
        "ALTER TABLE people ADD added int DEFAULT 5",
        "INSERT INTO people VALUES ('new', 'a@x', '1', 's', NULL)",
        "ALTER TABLE part ALTER n TYPE numeric(10,2)",
        "UPDATE part SET n = 2.5 WHERE id = 'infinity'",
    )
    await_until(
        lambda: all(
            any(c["name"] == name for c in last(shop, table)["columns"])
            and last(shop, table)["state"] == "live"
            for table, name in (("public.people", "added"), ("public.part", "n__v2"))
        ),
        LIMIT_S,
        lambda: f"the tables to be live with their new columns\n{shop.daemon.tail()}",
    )
    # the plain mirror does not fill in what old rows have of a column that was added
    database.execute("UPDATE people SET added = added")
    shop.catch_up()
    found = shop.results()
    assert {name: result.state for name, result in found.items()} == dict.fromkeys(
        NAMED, ReconcileState.EQUAL
    ), found
    assert found["public.part"].source_rows == 3
    infinite = {"_cdc_raw": [("id", "0044-03-15 BC")]}
    two_and_a_half = Decimal("2.5")
    shop.alter(
        "public.part",
        lambda rows: [r | infinite if r["n__v2"] == two_and_a_half else r for r in rows],
    )
    shop.alter("public.people", lambda rows: updated(rows, "k1", mail="1@x"))
    report = tmp_path / "report"
    more = ("--report", str(report), "--values", "public.part", "public.people")
    assert shop.reconcile(*more) == 1
    named = sorted(
        [
            (d["kind"], d["key"], d["columns"], d["source_values"], d["mirror_values"])
            for d in shop.differences(report)
        ],
        key=str,
    )
    [masked] = [found for found in named if found[0] == "different"]
    assert named == [
        ("different", '{"id":"k1"}', ["mail"], masked[3], {"mail": "1@x"}),
        ("extra", '{"id":"0044-03-15 BC"}', None, None, {"id": "0044-03-15 BC", "n__v2": "2.50"}),
        ("missing", '{"id":"infinity"}', None, {"id": "infinity", "n__v2": "2.50"}, None),
    ]
    assert "@" not in masked[3]["mail"]  # masked as in the lake


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_jsonb_as_variant_is_compared_as_json(database: Database, make_shop: Any) -> None:
    """Also what VARIANT can't hold, values that were not sent, and copies of equal rows."""
    long = "1" * 39
    database.execute(
        "CREATE TABLE docs (id int PRIMARY KEY, n int, doc jsonb)",
        "ALTER TABLE docs ALTER doc SET STORAGE EXTERNAL",
        "INSERT INTO docs SELECT n, 0, jsonb_build_object('b', 1.50, 'a', repeat('x', 3000))"
        " FROM generate_series(1, 9) n",
        f"INSERT INTO docs VALUES (10, 0, '[{long}]'), (11, 0, NULL), (12, 0, 'null')",
        "CREATE TABLE copies (doc jsonb)",
        "ALTER TABLE copies REPLICA IDENTITY FULL",
        f"INSERT INTO copies VALUES ('1.0'), ('1.0'), ('{long}'), (NULL)",
    )
    shop: Shop = make_shop()
    job = ["--lake", str(shop.lake), "--source", "shop", "--target", str(shop.target), "--once"]

    def states() -> dict[str, str]:
        with database.connect() as connection:
            await_caught_up(connection, database.name, LIMIT_S)
        assert mirror.main([*job, "--variant"]) == 0
        return {name: str(result.state) for name, result in shop.results().items()}

    equal = dict.fromkeys(("public.copies", "public.docs"), str(ReconcileState.EQUAL))
    assert states() == equal
    database.execute(
        "UPDATE docs SET n = 1",
        f"UPDATE copies SET doc = '{long}' WHERE ctid = (SELECT min(ctid) FROM copies)",
        f"DELETE FROM copies WHERE ctid = (SELECT max(ctid) FROM copies WHERE doc = '{long}')",
    )
    assert states() == equal
    path = table_path(str(shop.target), "public.docs")
    shop.spark.sql(f"UPDATE delta.`{path}` SET doc = parse_json('2') WHERE id = 12")
    assert shop.results()["public.docs"].different == 1


def last(shop: Shop, table: str) -> dict[str, Any]:
    rows = [row for row in registry(shop.lake) if row["table"] == table]
    return max(rows, key=lambda row: row["at"]) if rows else {"columns": [], "state": None}


@pytest.mark.thorough
def test_tables_behind_or_unknown_are_reported(workload_database: Database, make_shop: Any) -> None:
    database = workload_database
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)", "INSERT INTO orders VALUES (1)")
    shop: Shop = make_shop()
    with pytest.raises(ConfigError, match=r"did you mean 'public\.orders'"):
        shop.reconcile("public.order")
    with (
        Workload(database.dsn, seed=1, transactions=10**6, limit_s=120, pause_s=0.05),
        pytest.raises(TransientError, match="has not reached epoch") as behind,
    ):
        reconcile.main(shop.arguments("--wait", "3s"))
    assert behind.value.reason == "mirror_behind"
    shop.daemon.sigkill()
    database.execute("INSERT INTO orders VALUES (2)")
    with pytest.raises(TransientError, match="that the daemon runs") as lake:
        reconcile.main(shop.arguments("--wait", "500ms"))
    assert lake.value.reason == "lake_behind"
    # The server drops a temporary slot some time after its session has ended.
    await_until(lambda: database.slots() == [database.name], 30, "the temporary slot's end")

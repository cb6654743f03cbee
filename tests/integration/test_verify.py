"""A source held against its lake: no false alarm under writers, no damage missed."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from psycopg import AsyncConnection
from typer.testing import CliRunner

from ingestd import cli
from ingestd.app.verify import verify
from ingestd.lake.delta.read import read_raw
from ingestd.lake.layout import Layout
from ingestd.lake.maintenance.process import maintain
from ingestd.model.schema import TableId
from ingestd.postgres.verify_source import SourceAtPoint
from ingestd.terminal.verify import Untold
from ingestd.testing.oracle.comparison import await_caught_up
from tests.harness.compare import registry
from tests.harness.config import polling_config, wal_config
from tests.harness.databases import fresh_database
from tests.harness.maintaining import order_of
from tests.harness.toast_writers import ToastWriters, create_big
from tests.harness.user_types import SETUP
from tests.harness.waiting import await_until
from tests.harness.wide_tables import Wide, array_columns_of, built_in_types, columns_of
from tests.harness.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ingestd.model.schema import Table
    from ingestd.ports import Split
    from ingestd.testing.embedded.daemon import Daemon
    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 90.0


@dataclass
class Shop:
    """A source, its daemon and its lake."""

    database: Database
    daemon: Daemon
    lake: Path

    def verify(self, *more: str, config: Path | None = None) -> tuple[int, str]:
        path = str(config or self.daemon.config_path)
        arguments = ["verify", "shop", "--config", path, "--wait", "90s", *more]
        with ticking(self.database):
            found = CliRunner().invoke(cli.app, arguments)
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        return found.exit_code, found.stdout if "--json" in more else found.output

    def verify_by(
        self, source_type: type[SourceAtPoint], *tables: str
    ) -> tuple[int, dict[str, dict[str, Any]]]:
        """Verify as the command does, with another way to read the source."""
        with ticking(self.database):
            found = verify(
                self.daemon.config_path,
                "shop",
                tables,
                wait_s=LIMIT_S,
                memory_bytes=None,
                rate_bytes_per_s=None,
                shown=20,
                with_values=False,
                progress=Untold(),
                source_type=source_type,
            )
        return found.exit_code, by_table(json.dumps(found.to_json()))

    def report(self, *more: str) -> dict[str, dict[str, Any]]:
        _, said = self.verify("--json", *more)
        return by_table(said)

    def equal(self, *more: str) -> dict[str, int]:
        """Rows by table; all must be equal."""
        code, said = self.verify("--json", *more)
        assert code == 0, said
        found = by_table(said)
        assert {t["state"] for t in found.values()} == {"equal"}, said
        return {name: t["source_rows"] for name, t in found.items()}

    def catch_up(self) -> None:
        with self.database.connect() as connection:
            await_caught_up(connection, self.database.name, LIMIT_S)

    def await_read(self) -> None:
        """Wait until no table is being read: the source may be ready before that is recorded."""

        def is_read() -> bool:
            last = {row["table"]: row["state"] for row in registry(self.lake)}
            return bool(last) and "snapshotting" not in last.values()

        await_until(is_read, LIMIT_S, self.daemon.tail)

    def await_live(self, *tables: str, column: str | None = None) -> None:
        def is_live(name: str) -> bool:
            rows = [row for row in registry(self.lake) if row["table"] == name]
            last = max(rows, key=lambda row: row["at"], default=None)
            if last is None or last["state"] != "live":
                return False
            return column is None or any(c["name"] == column for c in last["columns"])

        await_until(
            lambda: all(map(is_live, tables)),
            LIMIT_S,
            lambda: f"{tables} to be live\n{self.daemon.tail()}",
        )

    def damage(self, table: str, holds: str, change: Callable[[pa.Table], pa.Table]) -> None:
        """Rewrite in place the raw file that has the row with this `note`."""
        folder = self.lake / Layout("shop").raw(TableId.parse(table))
        for path in sorted(folder.glob("*.parquet")):
            rows = pq.read_table(path)
            if rows.num_rows and pc.any(pc.equal(rows["note"], holds)).as_py():
                pq.write_table(change(rows), path)
                return
        raise AssertionError(f"no row {holds!r} in {folder}")


TICKER = "public.ticker"
MAKE_TICKER = "CREATE TABLE ticker (n serial PRIMARY KEY)"


@contextmanager
def ticking(database: Database) -> Iterator[None]:
    """Write to a captured table all the time, so that the lake reaches a position soon."""
    stop = threading.Event()

    def tick() -> None:
        with database.connect() as connection:
            connection.execute("SET synchronous_commit = local")
            while not stop.wait(0.1):
                connection.execute("INSERT INTO ticker DEFAULT VALUES")

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(tick)
        try:
            yield
        finally:
            stop.set()
    working.result()


def by_table(said: str) -> dict[str, dict[str, Any]]:
    """What a report has of each table, but the one that is written all the time."""
    found = {table["table"]: table for table in json.loads(said)["tables"]}
    found.pop(TICKER, None)
    return found


@pytest.fixture
def make_shop(database: Database, lake: Path, make_daemon: MakeDaemon) -> Any:
    def make(tables: tuple[str, ...] = ("public.*",), more: str = "", extra: str = "") -> Shop:
        database.execute(MAKE_TICKER)
        text = wal_config(
            lake=lake,
            dsn=database.dsn,
            tables=(*tables, TICKER),
            source_extra=f'slot = "{database.name}"\npublication = "{database.name}"\n'
            f'discover_interval = "500ms"\n{more}',
            extra=extra,
        )
        daemon = make_daemon(text)
        daemon.start_ready(LIMIT_S)
        shop = Shop(database, daemon, lake)
        shop.await_read()
        return shop

    return make


WRITTEN = ("public.accounts", "public.big", "public.documents", "public.ticks")
TICKS = """
CREATE FUNCTION tick() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF TG_OP = 'INSERT' THEN INSERT INTO ticks VALUES (left(NEW.owner, 2), 1.5);
  ELSIF TG_OP = 'UPDATE' THEN
    UPDATE ticks SET n = n + 1 WHERE ctid = (SELECT ctid FROM ticks LIMIT 1 FOR UPDATE SKIP LOCKED);
  ELSE DELETE FROM ticks WHERE ctid = (SELECT ctid FROM ticks LIMIT 1 FOR UPDATE SKIP LOCKED);
  END IF; RETURN NULL; END $$"""


def test_equal_under_steady_writers(workload_database: Database, make_shop: Any) -> None:
    """Keys that move with values that were not sent, rows without keys, transactions half-way."""
    create_big(workload_database, 3000)
    workload_database.execute(
        "CREATE TABLE ticks (kind text, n float8)",
        "ALTER TABLE ticks REPLICA IDENTITY FULL",
        TICKS,
        "CREATE TRIGGER ticks AFTER INSERT OR UPDATE OR DELETE ON accounts"
        " FOR EACH ROW EXECUTE FUNCTION tick()",
    )
    shop: Shop = make_shop(WRITTEN, 'snapshot_chunk = "100kB"')
    dsn = workload_database.dsn
    with (
        Workload(dsn, seed=8, sessions=2, transactions=10**6, limit_s=300, pause_s=0.02),
        ToastWriters(workload_database, 3000),
    ):
        rows = shop.equal()
        small = shop.equal("--memory", "1MB")
        # re-read in chunks: alongside the old rows
        config = str(shop.daemon.config_path)
        asked = CliRunner().invoke(cli.app, ["snapshot", "shop", "public.big", "--config", config])
        assert asked.exit_code == 0, asked.output
        assert shop.equal("public.big")["public.big"] > 2000
    assert rows.keys() == small.keys() == set(WRITTEN)
    assert min(rows["public.big"], small["public.big"]) > 2000
    assert workload_database.slots() == [workload_database.name]  # none was made


DAMAGED = ("public.keyed", "public.plain")


def _rewritten(rows: pa.Table) -> pa.Table:
    """Take row 1 away, change 2, double 3, put a row 99 in."""
    changes = rows.to_pylist()
    changes = [row for row in changes if row["id"] != 1]
    for row in changes:
        if row["id"] == 2:
            row["amount"] += 1
    third = next(row for row in changes if row["id"] == 3)
    return pa.Table.from_pylist([*changes, third, {**third, "id": 99}], rows.schema)


def _one_for_another(rows: pa.Table) -> pa.Table:
    """Take one of two equal rows away; double another one."""
    changes = rows.to_pylist()
    gone = next(row for row in changes if row["note"] == "twice")
    changes.remove(gone)
    once = next(row for row in changes if row["note"] == "once")
    return pa.Table.from_pylist([*changes, {**once, "_cdc_seq": 1000}], rows.schema)


@pytest.mark.thorough
def test_damage_of_every_kind_is_named(database: Database, make_shop: Any) -> None:
    database.execute(
        "CREATE TABLE keyed (id int PRIMARY KEY, note text, amount numeric(9,2), secret text)",
        "CREATE TABLE plain (note text, n int)",
        "ALTER TABLE plain REPLICA IDENTITY FULL",
    )
    shop: Shop = make_shop(
        DAMAGED,
        'mask_key = "k"',
        '[sources.shop.table."public.keyed"]\nmask_columns = { secret = "sha256" }',
    )
    database.execute(
        "INSERT INTO keyed SELECT n, 'keyed-' || n, n, 'hidden' FROM generate_series(1, 9) n",
        "INSERT INTO plain VALUES ('twice', 1), ('twice', 1), ('once', 1)",
    )
    assert shop.equal() == {"public.keyed": 9, "public.plain": 3}
    shop.damage("public.keyed", "keyed-1", _rewritten)
    shop.damage("public.plain", "twice", _one_for_another)
    code, said = shop.verify()
    assert code == 1
    lines = [" ".join(line.split()) for line in said.splitlines()]
    for line in (
        "missing id='1'",
        "different id='2' in amount",
        "extra id='99'",
        "doubled id='3'",
    ):
        assert line in lines, said
    assert "keyed-" not in said
    assert "3.00" not in said  # no value but those of keys
    found = shop.report("--values")
    keyed, plain = found["public.keyed"], found["public.plain"]
    assert keyed["differences"] == {"missing": 1, "extra": 1, "different": 1, "doubled": 1}
    assert (keyed["source_rows"], keyed["lake_rows"]) == (9, 9)
    [changed] = [row for row in keyed["rows"] if row["kind"] == "different"]
    assert (changed["source"], changed["lake"]) == ({"amount": "2.00"}, {"amount": "3.00"})
    [missing] = [row for row in keyed["rows"] if row["kind"] == "missing"]
    assert missing["source"]["note"] == "keyed-1"
    assert missing["source"]["secret"] == "(masked)"
    assert plain["differences"] == {"missing": 1, "extra": 1, "different": 0, "doubled": 0}
    assert {row["kind"]: row["source"] or row["lake"] for row in plain["rows"]} == {
        "missing": {"note": "twice", "n": "1"},
        "extra": {"note": "once", "n": "1"},
    }
    # what is found in the history of a row counts, too
    database.execute("UPDATE keyed SET amount = 7 WHERE id = 3", "DELETE FROM keyed WHERE id = 2")
    found = shop.report("public.keyed")
    assert found["public.keyed"]["differences"] == {
        "missing": 1,
        "extra": 1,
        "different": 0,
        "doubled": 1,
    }


SHAPED = (
    "public.every_type",
    "public.nothing",
    "public.part",
    "public.people",
    "public.typed",
    'public.Ünï "x".y',
    "public.country",
)
SECTIONS = """\
[sources.shop.table."public.people"]
exclude_columns = ["secret"]
mask_columns = { mail = "sha256", phone = "null" }
[sources.shop.table."public.typed"]
types = { free = "decimal(12,2)" }
[sources.shop.table."public.country"]
reference = "snapshot_only"
"""


@pytest.mark.thorough
def test_types_shapes_and_changed_columns(database: Database, make_shop: Any) -> None:
    """I7: whatever a column is of, and `_cdc_raw`, is compared as it is."""
    types = built_in_types(database)
    wide = Wide("every_type", [*columns_of(types), *array_columns_of(types[::5])])
    database.execute(
        *SETUP,
        "CREATE TABLE people (id text PRIMARY KEY, mail text, phone text, secret text)",
        "INSERT INTO people SELECT 'k' || n, n || '@x', '123', 's' FROM generate_series(1, 9) n",
        "CREATE TABLE part (id timestamp, n int, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
        "CREATE TABLE part_1 PARTITION OF part FOR VALUES FROM (MINVALUE) TO ('2024-01-01')",
        "CREATE TABLE part_2 PARTITION OF part FOR VALUES FROM ('2024-01-01') TO (MAXVALUE)",
        "INSERT INTO part VALUES ('-infinity', 1), ('2023-01-01', 2), ('infinity', 3)",
        "CREATE TABLE nothing (id int PRIMARY KEY)",
        "CREATE TABLE typed (id int PRIMARY KEY, free numeric, wide numeric(10,2), gone int)",
        "INSERT INTO typed VALUES (1, 1.5, 1.25, 1), (2, 'NaN', 2, 2), (3, 1.555, NULL, 3)",
        'CREATE TABLE "Ünï ""x"".y" ("größe.1" int PRIMARY KEY, "a b" text)',
        """INSERT INTO "Ünï ""x"".y" VALUES (1, 'ä'), (2, NULL)""",
        "CREATE TABLE country (id int PRIMARY KEY)",
    )
    wide.create(database)
    shop: Shop = make_shop(SHAPED, 'mask_key = "k"', SECTIONS)
    wide.change(database)
    database.execute(
        "ALTER TABLE people ADD added int DEFAULT 5",
        "INSERT INTO people VALUES ('new', 'a@x', '1', 's', NULL)",
        "ALTER TABLE part ALTER n TYPE numeric(10,2)",
        "UPDATE part SET n = 2.5 WHERE id = 'infinity'",
        "ALTER TABLE typed ALTER wide TYPE numeric(14,2), DROP gone",
        "UPDATE typed SET free = free WHERE id = 2",
        "INSERT INTO typed VALUES (4, 1, 99999999999.99)",
    )
    shop.await_live("public.people", column="added")
    shop.await_live("public.part", column="n__v2")
    shop.await_live("public.typed", column="wide__v2")
    code, said = shop.verify("--json")
    found = by_table(said)
    [country] = [found.pop(name) for name in list(found) if name == "public.country"]
    assert country["state"] == "not compared"
    assert "reference table" in country["note"]
    assert {n: t["state"] for n, t in found.items()} == dict.fromkeys(found, "equal"), found
    assert len(found) == len(SHAPED) - 1
    assert found["public.typed"]["source_rows"] == 4
    assert code == 0
    assert shop.verify("public.country")[0] == 1  # nothing was compared


def test_tables_that_cannot_be_compared_are_reported(
    database: Database, make_shop: Any, tmp_path: Path, stranger: str
) -> None:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, n int)",
        "INSERT INTO orders VALUES (1, 1)",
    )
    shop: Shop = make_shop()
    database.execute(
        "CREATE TABLE keyless (id int)", f"GRANT SELECT ON orders, ticker TO {stranger}"
    )
    found = shop.report()
    assert found["public.orders"]["state"] == "equal"
    assert found["public.keyless"]["state"] == "not compared"
    assert "REPLICA IDENTITY" in found["public.keyless"]["fault"]["remedy"]
    for wrong in (["nowhere", "-c"], ["shop", "public.order", "-c"]):
        arguments = ["verify", *wrong, str(shop.daemon.config_path)]
        assert CliRunner().invoke(cli.app, arguments).exit_code == 2
    # no right but to read: nothing is written, no slot is made
    reader = tmp_path / "reader.toml"
    own = shop.daemon.config_path.read_text("utf-8")
    dsn = database.server.dsn(database.name, user=stranger)
    reader.write_text(own.replace(database.dsn, dsn), "utf-8")
    code, said = shop.verify("public.orders", config=reader)
    assert code == 0, said
    shop.daemon.sigkill()
    database.execute("INSERT INTO orders VALUES (2, 2)")
    code, said = shop.verify("--wait", "500ms")
    assert code == 75
    assert "is the daemon running" in said
    assert "it did not move meanwhile" in said


@pytest.mark.thorough
def test_joined_files_of_a_table_that_was_once_sent_whole(
    database: Database, make_shop: Any
) -> None:
    """They have room for all of an old row, also where only its key was sent."""
    database.execute(
        "CREATE TABLE big (id int PRIMARY KEY, payload text, n int)",
        "ALTER TABLE big ALTER payload SET STORAGE EXTERNAL",
        "ALTER TABLE big REPLICA IDENTITY FULL",
    )
    shop: Shop = make_shop(("public.big",), 'before = "full"')
    database.execute(
        "INSERT INTO big SELECT n, repeat(md5(n::text), 200), n FROM generate_series(1, 20) n"
    )
    shop.catch_up()
    database.execute("UPDATE big SET n = n + 1")
    shop.catch_up()
    database.execute("ALTER TABLE big REPLICA IDENTITY DEFAULT")

    def identity() -> str:
        rows = [row for row in registry(shop.lake) if row["table"] == "public.big"]
        return str(rows[-1]["replica_identity"])

    await_until(lambda: identity() == "d", LIMIT_S, shop.daemon.tail)
    for change in ("n = n + 1", "id = id + 1000") * 4:
        database.execute(f"UPDATE big SET {change}")
        shop.catch_up()
    assert shop.equal("public.big") == {"public.big": 20}
    folder = shop.lake / Layout("shop").raw(TableId("public", "big"))
    files = len(list(folder.glob("*.parquet")))
    told = list(maintain(json.loads(order_of(shop.lake))))
    assert len(list(folder.glob("*.parquet"))) > files, told
    assert shop.equal("public.big") == {"public.big": 20}


@pytest.mark.thorough
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_locked_table_is_not_waited_for(
    database: Database, make_shop: Any, *, is_cut: bool
) -> None:
    """Neither where its size is asked for, nor where it is read: the snapshot would be kept."""
    database.execute("CREATE TABLE aa (id int PRIMARY KEY)", "CREATE TABLE bb (id int PRIMARY KEY)")
    shop: Shop = make_shop(("public.aa", "public.bb"))
    with database.connect(autocommit=False) as holder:

        class Locked(SourceAtPoint):
            lock_timeout_s = 0.5

            async def splits(self, table: Table) -> Sequence[Split]:
                if not is_cut:
                    holder.execute("LOCK TABLE aa IN ACCESS EXCLUSIVE MODE")
                found = await super().splits(table)
                holder.execute("LOCK TABLE aa IN ACCESS EXCLUSIVE MODE")
                return found

        code, found = shop.verify_by(Locked, "public.aa", "public.bb")
        holder.rollback()
    assert found["public.bb"]["state"] == "equal"
    assert found["public.aa"]["state"] == "not compared"
    assert "holds a lock on it" in found["public.aa"]["fault"]["what"]
    assert code == 1


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["cut short", "gone"])
def test_a_damaged_file_is_a_fault_of_its_table_alone(
    database: Database, make_shop: Any, how: str
) -> None:
    for name in ("aa", "bb"):
        database.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY)", f"INSERT INTO {name} SELECT 1"
        )
    shop: Shop = make_shop(("public.aa", "public.bb"))
    for path in (shop.lake / Layout("shop").raw(TableId("public", "aa"))).glob("*.parquet"):
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:100])
    code, said = shop.verify("--json", "public.aa", "public.bb")
    found = by_table(said)
    assert found["public.bb"]["state"] == "equal"
    assert found["public.aa"]["state"] == "not compared"
    told = {"cut short": "a data file is damaged", "gone": "that existed is missing"}
    assert told[how] in found["public.aa"]["fault"]["what"]
    assert code == 1


def test_tables_compared_before_a_fault_are_reported(database: Database, make_shop: Any) -> None:
    database.execute(*(f"CREATE TABLE {n} (id int PRIMARY KEY)" for n in ("aa", "bb", "cc")))
    shop: Shop = make_shop(("public.aa", "public.bb", "public.cc"))

    class CutOff(SourceAtPoint):
        async def splits(self, table: Table) -> Sequence[Split]:
            if table.id.name == "bb":  # the session that holds the snapshot
                assert isinstance(self._held, AsyncConnection)
                pid = self._held.info.backend_pid
                database.execute(f"SELECT pg_terminate_backend({pid}, 30000)")
            return await super().splits(table)

    code, found = shop.verify_by(CutOff, "public.aa", "public.bb", "public.cc")
    assert [found[f"public.{n}"]["state"] for n in ("aa", "bb", "cc")] == [
        "equal",
        "not reached",
        "not reached",
    ]
    assert "has ended" in found["public.bb"]["fault"]["what"]
    assert found["public.cc"]["note"] == "the verification ended at table public.bb"
    assert code == 75


@pytest.mark.thorough
def test_it_reads_no_faster_than_it_may(database: Database, make_shop: Any) -> None:
    database.execute(
        "CREATE TABLE load (id int PRIMARY KEY, note text)",
        "INSERT INTO load SELECT n, repeat('x', 100) FROM generate_series(1, 20000) n",
    )
    shop: Shop = make_shop()
    shop.catch_up()
    began = time.monotonic()
    assert shop.verify("--limit-rate", "1MB/s")[0] == 0
    assert time.monotonic() - began > 20000 * 100 / 1e6


@pytest.mark.thorough
def test_a_polled_source_settles(database: Database, lake: Path, make_daemon: MakeDaemon) -> None:
    database.execute(
        "CREATE TABLE keyed (id int PRIMARY KEY, note text, amount numeric(9,2), gone bool)",
        "INSERT INTO keyed SELECT n, 'keyed-' || n, n, n = 9 FROM generate_series(1, 9) n",
        "CREATE TABLE unswept (id int PRIMARY KEY)",
        "INSERT INTO unswept VALUES (1), (2)",
        MAKE_TICKER,
    )
    section = '[sources.shop.table."public.keyed"]\ndetect_deletes = "300ms"\ndeleted = "gone"'
    daemon = make_daemon(polling_config(lake=lake, dsn=database.dsn, extra=section))
    daemon.start_ready(LIMIT_S)
    shop = Shop(database, daemon, lake)
    shop.await_live("public.keyed", "public.unswept")
    database.execute(
        "DELETE FROM unswept WHERE id = 1",
        "UPDATE keyed SET amount = 5 WHERE id = 5",
        "DELETE FROM keyed WHERE id = 6",
    )
    found = shop.report()
    assert {n: t["state"] for n, t in found.items()} == dict.fromkeys(found, "equal"), found
    assert found["public.keyed"]["source_rows"] == 7
    assert "detect_deletes is off" in found["public.unswept"]["note"]
    shop.damage("public.keyed", "keyed-1", _rewritten)
    code, said = shop.verify("--wait", "8s", "public.keyed")
    assert code == 1, said
    lines = [" ".join(line.split()) for line in said.splitlines()]
    for line in ("missing id='1'", "different id='2' in amount", "doubled id='3'"):
        assert line in lines, said


@pytest.mark.thorough
def test_commits_not_yet_visible_are_left_out(
    own_postgres: PostgresServer, lake: Path, make_daemon: MakeDaemon
) -> None:
    """They wait for a synchronous standby, but are in the lake already."""
    with fresh_database(own_postgres) as database:
        database.execute(
            "CREATE TABLE orders (id int PRIMARY KEY, note text)",
            "INSERT INTO orders SELECT n, 'old' FROM generate_series(1, 5) n",
            MAKE_TICKER,
        )
        daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn))
        daemon.start_ready(LIMIT_S)
        shop = Shop(database, daemon, lake)
        shop.await_live("public.orders")
        with _standby_awaited(database), ThreadPoolExecutor(1) as pool:
            writer = database.connect()
            waiting = pool.submit(
                writer.execute,
                "WITH gone AS (DELETE FROM orders WHERE id = 1),"
                " other AS (UPDATE orders SET note = 'new' WHERE id = 2)"
                " INSERT INTO orders VALUES (6, 'new')",
            )
            try:
                await_until(
                    lambda: _has(lake, "new"),
                    LIMIT_S,
                    lambda: f"the commit in the lake\n{daemon.tail()}",
                )
                assert database.value("SELECT count(*) FROM orders WHERE note = 'new'") == 0
                assert shop.equal() == {"public.orders": 5}
            finally:
                writer.cancel_safe(timeout=LIMIT_S)
                waiting.result(LIMIT_S)  # it is committed all the same
                writer.close()
        assert database.value("SELECT count(*) FROM orders WHERE note = 'new'") == 2
        assert shop.equal() == {"public.orders": 5}
        daemon.sigterm()


@contextmanager
def _standby_awaited(database: Database) -> Iterator[None]:
    """Commits wait for an absent standby, except those of the ticker."""

    def set_to(names: str) -> None:
        database.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
        database.execute("SELECT pg_reload_conf()")
        await_until(
            lambda: database.value("SHOW synchronous_standby_names") == names, LIMIT_S, names
        )

    set_to("nobody")
    try:
        yield
    finally:
        set_to("")


def _has(lake: Path, note: str) -> bool:
    rows = read_raw(str(lake), "shop", TableId("public", "orders"))
    return bool(pc.any(pc.equal(rows["note"], note)).as_py())

"""Current rows in the lake, kept by a real daemon (design section 2)."""

from __future__ import annotations

import datetime as dt
import json
import random
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from ingestd.app.check import check
from ingestd.http.client import fetch_status, request_snapshot
from ingestd.lake.delta.read import read_files
from ingestd.lake.layout import Layout
from ingestd.lake.store.store import open_store
from ingestd.model.schema import TableId
from tests.harness.command_line import run_command
from tests.harness.config import wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ingestd.model.check import CheckLine
    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60
DISCOVER_S = 1
PRICES = TableId("public", "prices")
Rows = list[tuple[Any, ...]]


def config(database: Database, lake: Path, reference: str, *extra: str, source: str = "") -> str:
    names = [
        f'slot = "{database.name}"',
        f'publication = "{database.name}"',
        f'discover_interval = "{DISCOVER_S}s"',
        source,
    ]
    table = [f'[sources.shop.table."{PRICES}"]', f'reference = "{reference}"', *extra]
    return wal_config(
        lake=lake,
        dsn=database.dsn,
        source_extra="\n".join(names),
        extra="\n".join(table),
    )


def polling_config(database: Database, lake: Path, reference: str, *extra: str) -> str:
    if reference == "snapshot_plus_cdc":
        extra = (*extra, 'detect_deletes = "1s"')
    text = config(database, lake, reference, *extra)
    for key in ("slot", "publication"):
        text = text.replace(f'{key} = "{database.name}"\n', "")
    return text.replace('kind = "wal"', 'kind = "polling"\ninterval = "200ms"')


def create(database: Database, rows: int = 200) -> None:
    database.execute(
        "CREATE TABLE prices (id int PRIMARY KEY, name text, price numeric(10,2), note text)",
        f"INSERT INTO prices SELECT i, 'item ' || i, i, NULL FROM generate_series(1, {rows}) i",
    )


def handle(lake: Path, version: int | None = None) -> DeltaTable | None:
    try:
        return DeltaTable(str(lake / Layout("shop").reference(PRICES)), version=version)
    except TableNotFoundError:
        return None


def versions(lake: Path) -> int:
    found = handle(lake)
    return 0 if found is None else found.version() + 1


def settled_versions(lake: Path) -> int:
    """Return how many versions there are once none came during three catalog polls.

    A poll that comes after the rows may still re-snapshot a table of which columns were recreated.
    """
    count, since_s = versions(lake), time.monotonic()

    def has_settled() -> bool:
        nonlocal count, since_s
        if versions(lake) != count:
            count, since_s = versions(lake), time.monotonic()
        return time.monotonic() - since_s > 3 * DISCOVER_S

    await_until(has_settled, LIMIT_S, "no further version")
    return count


def current(lake: Path, version: int | None = None) -> Rows:
    found = handle(lake, version)
    if found is None:
        return []
    folder = Layout("shop").reference(PRICES)
    rows = read_files(found, open_store(str(lake), None), folder).to_pylist()
    return sorted(tuple(row.values()) for row in rows)


def source_rows(database: Database) -> Rows:
    return sorted(database.rows("SELECT * FROM prices"))


def await_equal(database: Database, lake: Path) -> None:
    expected = source_rows(database)
    await_until(lambda: versions(lake) > 0 and current(lake) == expected, LIMIT_S, "the rows")


def reference(daemon: Daemon) -> dict[str, Any]:
    status = fetch_status(daemon.listen)
    assert status is not None
    [found] = status["sources"]["shop"]["references"]
    return dict(found)


def await_streaming(daemon: Daemon) -> None:
    def is_streaming() -> bool:
        status = fetch_status(daemon.listen)
        return status is not None and status["sources"]["shop"]["state"] == "streaming"

    await_until(is_streaming, LIMIT_S, "the source to stream")


def snapshot(daemon: Daemon, *tables: str) -> subprocess.CompletedProcess[str]:
    return run_command(daemon.config_path, "snapshot", "shop", *tables)


# --- read again ------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("make", [config, polling_config])
def test_rows_are_read_every_refresh_and_committed_if_different(
    database: Database, lake: Path, make_daemon: MakeDaemon, make: Callable[..., str]
) -> None:
    create(database)
    daemon = make_daemon(make(database, lake, "snapshot_only", 'refresh = "300ms"'))
    daemon.start_ready()
    await_equal(database, lake)
    assert versions(lake) == 1
    looked = reference(daemon)["looked"]
    await_until(lambda: reference(daemon)["looked"] > looked, LIMIT_S, "another look")
    database.execute("UPDATE prices SET name = name", "VACUUM FULL prices")
    looked = reference(daemon)["looked"]
    await_until(lambda: reference(daemon)["looked"] > looked, LIMIT_S, "another look")
    assert versions(lake) == 1, "a version without a difference"
    database.execute("UPDATE prices SET price = 7 WHERE id = 3", "DELETE FROM prices WHERE id = 4")
    await_equal(database, lake)
    assert not (lake / Layout("shop").raw(PRICES)).exists(), "its changes were captured"
    [table] = (fetch_status(daemon.listen) or {})["sources"]["shop"]["tables"]
    assert (table["table"], table["state"]) == (str(PRICES), "live")


def test_an_empty_table_is_loaded_and_columns_change(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    create(database, 0)
    daemon = make_daemon(config(database, lake, "snapshot_only", 'refresh = "200ms"'))
    daemon.start_ready()
    await_until(lambda: versions(lake) == 1, LIMIT_S, "the empty table")
    assert current(lake) == []
    assert reference(daemon)["rows"] == 0
    database.execute(
        "ALTER TABLE prices ADD COLUMN at timestamp, DROP COLUMN note,"
        " ALTER COLUMN price TYPE bigint",
        "INSERT INTO prices VALUES (1, 'a', 5, '2026-01-02 03:04:05')",
    )
    await_until(
        lambda: current(lake) == [(1, "a", 5, dt.datetime(2026, 1, 2, 3, 4, 5))],  # noqa: DTZ001
        LIMIT_S,
        "the new columns",
    )
    database.execute("TRUNCATE prices")
    await_until(lambda: current(lake) == [], LIMIT_S, "the empty table")


@pytest.mark.thorough
def test_manual_is_read_once_then_when_asked_for(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    create(database)
    daemon = make_daemon(config(database, lake, "manual"))
    daemon.start_ready()
    await_equal(database, lake)
    database.execute("DELETE FROM prices WHERE id > 5")
    daemon.sigterm()
    daemon.start_ready()
    assert len(current(lake)) == 200
    found = snapshot(daemon, str(PRICES))
    assert found.returncode == 0, found.stderr
    assert current(lake) == source_rows(database)
    assert snapshot(daemon, str(PRICES)).returncode == 0
    assert versions(lake) == 2, "a version without a difference"


def test_i8_a_fault_is_the_tables_own(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    create(database)
    database.execute(
        "CREATE TABLE other (id int PRIMARY KEY)",
        "ALTER TABLE prices ALTER COLUMN price TYPE numeric",
        "ALTER TABLE prices ADD COLUMN day date",
        "UPDATE prices SET day = 'infinity' WHERE id = 9",
    )
    daemon = make_daemon(config(database, lake, "snapshot_only", 'refresh = "200ms"'))
    daemon.start()
    await_until(lambda: bool(daemon.events("reference.stopped")), LIMIT_S, "the table to stop")
    assert not versions(lake)
    found = reference(daemon)
    assert found["state"] == "stopped"
    assert "'day'" in found["reason"]
    assert 'types = { day = "string" }' in found["remedy"]
    await_streaming(daemon)
    status = fetch_status(daemon.listen) or {}
    assert any("public.prices" in reason for reason in status["not_ready_because"])
    database.execute("UPDATE prices SET day = NULL")
    assert snapshot(daemon, str(PRICES)).returncode == 0
    daemon.await_ready()
    assert len(current(lake)) == 200


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changed",
    [
        "; ".join(
            f"ALTER TABLE prices RENAME {old} TO {new}"
            for old, new in (("name", "x"), ("note", "name"), ("x", "note"))
        ),
        "ALTER TABLE prices DROP note; ALTER TABLE prices ADD note text",
        "ALTER TABLE prices DROP name; ALTER TABLE prices ADD name text DEFAULT 'new'",
    ],
    ids=["swap", "last anew", "anew"],
)
@pytest.mark.parametrize("kind", ["snapshot_only", "snapshot_plus_cdc"])
def test_columns_that_come_in_another_order(
    database: Database, lake: Path, make_daemon: MakeDaemon, kind: str, changed: str
) -> None:
    """Twice: what was swapped is swapped back."""
    create(database)
    database.execute("UPDATE prices SET note = 'note ' || id")
    refresh = ('refresh = "200ms"',) if kind == "snapshot_only" else ()
    daemon = make_daemon(config(database, lake, kind, *refresh))
    daemon.start_ready()
    for number in (1, 2):
        database.execute(f"BEGIN; {changed}; COMMIT")
        database.execute(f"INSERT INTO prices (id, name) VALUES ({1000 + number}, 'more')")
        await_until(lambda: by_name(lake) == source_by_name(database), LIMIT_S, daemon.tail)
    count, looked = settled_versions(lake), reference(daemon)["looked"]
    if kind == "snapshot_only":
        await_until(lambda: reference(daemon)["looked"] > looked, LIMIT_S, "another look")
    else:
        database.execute("INSERT INTO prices (id) VALUES (2000)")
        await_until(lambda: by_name(lake) == source_by_name(database), LIMIT_S, daemon.tail)
        count += 1
    assert versions(lake) == count, "a version without a difference"
    daemon.close()


def by_name(lake: Path) -> dict[int, dict[str, Any]]:
    found = handle(lake)
    assert found is not None
    rows = read_files(found, open_store(str(lake), None), Layout("shop").reference(PRICES))
    return {row["id"]: row for row in rows.to_pylist()}


def source_by_name(database: Database) -> dict[int, dict[str, Any]]:
    with database.connect() as connection:
        cursor = connection.execute("SELECT * FROM prices")
        names = [column.name for column in cursor.description or ()]
        rows = [dict(zip(names, row, strict=True)) for row in cursor]
    return {row["id"]: row for row in rows}


# --- followed --------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("make", [config, polling_config])
def test_changes_are_put_in_after_every_epoch(
    database: Database, lake: Path, make_daemon: MakeDaemon, make: Callable[..., str]
) -> None:
    create(database)
    daemon = make_daemon(make(database, lake, "snapshot_plus_cdc"))
    daemon.start_ready()
    await_equal(database, lake)
    big = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 400) i)"
    database.execute(
        "ALTER TABLE prices ALTER COLUMN note SET STORAGE EXTERNAL",
        f"UPDATE prices SET note = {big} WHERE id <= 20",
    )
    await_equal(database, lake)
    database.execute("UPDATE prices SET price = price + 1 WHERE id <= 20")  # note is not sent
    await_equal(database, lake)
    database.execute(
        "UPDATE prices SET id = id + 1000 WHERE id <= 20",
        "DELETE FROM prices WHERE id BETWEEN 100 AND 120",
        "INSERT INTO prices VALUES (5, 'again', 5, NULL)",
    )
    await_equal(database, lake)
    database.execute("ALTER TABLE prices ADD COLUMN stock int DEFAULT 7")
    database.execute("UPDATE prices SET stock = 8 WHERE id = 50")
    await_equal(database, lake)
    database.execute("BEGIN; TRUNCATE prices; INSERT INTO prices (id) VALUES (1); COMMIT")
    await_equal(database, lake)
    assert reference(daemon)["state"] == "live"
    assert reference(daemon)["epoch"] > 1
    found = snapshot(daemon, str(PRICES))
    assert found.returncode == 0, found.stderr
    await_equal(database, lake)


@pytest.mark.thorough
def test_a_table_without_a_key_is_a_multiset_of_rows(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """Equal rows, values that were not sent again, keys that pass each other on their way."""
    database.execute(
        "CREATE TABLE prices (id int, name text, cents int, note text)",
        "ALTER TABLE prices REPLICA IDENTITY FULL",
        "ALTER TABLE prices ALTER note SET STORAGE EXTERNAL",
        "INSERT INTO prices SELECT g % 30, 'x', g % 7, repeat(md5(g::text), 200)"
        " FROM generate_series(1, 100) g",
    )
    daemon = make_daemon(config(database, lake, "snapshot_plus_cdc"))
    daemon.start_ready(LIMIT_S)
    await_equal(database, lake)
    database.execute(
        "INSERT INTO prices SELECT * FROM prices WHERE id < 10",
        "UPDATE prices SET cents = cents + 1 WHERE id % 2 = 0",
        "UPDATE prices SET id = id + 1",
        "DELETE FROM prices WHERE id = 7 AND cents = 3",
    )
    await_equal(database, lake)
    daemon.sigkill()
    database.execute(
        "ALTER TABLE prices ADD COLUMN stock int DEFAULT 7", "DELETE FROM prices WHERE id = 3"
    )
    daemon.start_ready(LIMIT_S)
    await_equal(database, lake)
    database.execute("BEGIN; TRUNCATE prices; INSERT INTO prices (id) VALUES (1), (1); COMMIT")
    await_equal(database, lake)
    assert reference(daemon)["state"] == "live"


# --- kills -----------------------------------------------------------------------------------

ACCOUNTS = 300
TOTAL = ACCOUNTS * 100


class Transfers:
    """Moves money between rows for as long as it is open: the sum is the same at any moment."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _write(self) -> None:
        rng = random.Random(5)
        with self._database.connect(autocommit=False) as connection:
            while not self._stopping.is_set():
                one, other = rng.sample(range(1, ACCOUNTS + 1), 2)
                move = "UPDATE prices SET price = price + %s WHERE id = %s"
                connection.execute(move.encode(), [-1, one])
                connection.execute(move.encode(), [1, other])
                connection.commit()


@pytest.mark.thorough
@pytest.mark.parametrize("kills", [3, pytest.param(6, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["snapshot_only", "snapshot_plus_cdc"])
def test_every_version_is_a_consistent_state_despite_kills(
    database: Database, lake: Path, make_daemon: MakeDaemon, kind: str, kills: int
) -> None:
    create(database, ACCOUNTS)
    database.execute("UPDATE prices SET price = 100")
    extra = ['refresh = "50ms"'] if kind == "snapshot_only" else []
    daemon = make_daemon(config(database, lake, kind, *extra))
    rng = random.Random(7)
    with Transfers(database):
        for _ in range(kills):
            before = versions(lake)
            daemon.start()
            wanted = before + rng.randrange(0, 4)

            def is_there(wanted: int = wanted) -> bool:
                return versions(lake) > wanted

            await_until(is_there, LIMIT_S, "versions", poll_s=rng.uniform(0.005, 0.05))
            daemon.sigkill()
    daemon.start_ready()
    if kind == "snapshot_only":
        assert snapshot(daemon, str(PRICES)).returncode == 0
    await_equal(database, lake)
    assert versions(lake) > kills
    assert_moments(lake)


def assert_moments(lake: Path) -> None:
    """Whatever was transferred, the sum over all rows is the same at any moment."""
    for version in range(versions(lake)):
        rows = current(lake, version)
        assert len(rows) == ACCOUNTS, f"version {version} is half loaded"
        assert sum(row[2] for row in rows) == TOTAL, f"version {version} is of no moment"


@pytest.mark.thorough
def test_i6_an_incrementally_refreshed_table_is_resnapshotted(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    create(database, ACCOUNTS)
    database.execute("UPDATE prices SET price = 100")
    chunks = 'snapshot_chunk = "8KB"\nsnapshot_chunked_above = "0"'
    daemon = make_daemon(config(database, lake, "snapshot_plus_cdc", source=chunks))
    daemon.start_ready()

    def ended() -> int:
        return len([e for e in daemon.events("table.state") if e["state"] == "live"])

    def last() -> Any:
        [table] = (fetch_status(daemon.listen) or {})["sources"]["shop"]["tables"]
        return table["last_snapshot"]

    with Transfers(database):
        for where in ("id % 2 = 0", "id < 50"):
            then = str(last())
            request_snapshot(daemon.listen, "shop", [str(PRICES)], where)

            def is_over(then: str = then) -> bool:
                return str(last()) != then

            await_until(is_over, LIMIT_S, "the partial snapshot")
        count = ended()
        request_snapshot(daemon.listen, "shop", [str(PRICES)], None)
        await_until(lambda: ended() > count, LIMIT_S, "the snapshot")
    await_equal(database, lake)
    assert_moments(lake)


@pytest.mark.thorough
def test_what_the_commands_show(database: Database, lake: Path, make_daemon: MakeDaemon) -> None:
    create(database)
    daemon = make_daemon(config(database, lake, "manual"))
    daemon.start_ready()

    def status() -> dict[str, Any]:
        found = run_command(daemon.config_path, "status", "--json")
        source = json.loads(found.stdout)["sources"]["shop"]
        return {"table": source["tables"][0]["state"], **source["references"][0]}

    running = status()
    daemon.sigterm()
    for found in (running, status()):
        assert (found["table"], found["state"], found["rows"]) == ("public.prices", "live", 200)


def test_check_tells_what_would_stop_them(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    create(database)

    def line(reference: str, *extra: str) -> CheckLine:
        daemon = make_daemon(config(database, lake, reference, *extra), name=reference)
        [own] = [c for c in check(daemon.config_path) if c.subject == f"reference table {PRICES}"]
        return own

    assert line("manual").level == "ok"
    found = line("snapshot_only", 'exclude_columns = ["nte"]')
    assert found.level == "fail"
    assert "did you mean 'note'?" in str(found.remedy)
    database.execute(
        "ALTER TABLE prices DROP CONSTRAINT prices_pkey",
        "ALTER TABLE prices REPLICA IDENTITY FULL",
    )
    assert line("snapshot_plus_cdc").level == "ok"

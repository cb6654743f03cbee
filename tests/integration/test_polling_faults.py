"""Faults met by polling: what the user sees, and that nothing is lost."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.model.schema import TableId
from ingestd.testing.oracle.comparison import compare_source
from tests.harness.compare import assert_change_log_is_sound, await_listed, registry
from tests.harness.config import polling_config
from tests.harness.databases import Database
from tests.harness.shop_servers import shop_on, with_shop
from tests.harness.standbys import await_replayed, copy_of
from tests.harness.waiting import await_until
from tests.integration.test_bad_input import assert_fails, failed_events, ingestd, not_ready

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.conftest import MakeDaemon

LIMIT_S = 30.0
ITEM, OTHER = TableId("public", "item"), TableId("public", "other")
CURSOR = '[sources.shop.table."public.item"]\ncursor = "at"\n'
SWEPT = 'detect_deletes = "200ms"\n'


def await_equal(source: Database, lake: Path, *tables: TableId) -> None:
    """Wait until the fold of the lake is the source; the writers rest."""
    wrong: list[Any] = []

    def is_equal() -> bool:
        with source.connect() as connection:
            found = compare_source(connection, str(lake), "shop", tables)
        wrong[:] = [c for c in found if not c.is_equal]
        return not wrong

    await_until(is_equal, LIMIT_S, lambda: "\n".join(map(str, wrong)))
    await_listed(source, lake)


def entry(lake: Path, table: TableId) -> dict[str, Any]:
    """What `_tables` says of a table last."""
    rows = [row for row in registry(lake) if row["table"] == str(table)]
    return rows[-1] if rows else {"state": None, "reason": None}


def await_state(lake: Path, table: TableId, state: str) -> str:
    """Wait until a table is in a state; return the reason."""
    what = lambda: f"{table} to be {state}: {entry(lake, table)}"  # noqa: E731
    await_until(lambda: entry(lake, table)["state"] == state, LIMIT_S, what)
    return str(entry(lake, table)["reason"])


def row_ids(lake: Path, table: TableId = ITEM) -> list[int]:
    return [i for i in read_raw(str(lake), "shop", table)["id"].to_pylist() if i is not None]


@pytest.fixture
def items(database: Database) -> Database:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, note text, at timestamptz DEFAULT now())",
        "CREATE INDEX ON item (at)",
        "INSERT INTO item SELECT i, 'note ' || i FROM generate_series(1, 50) i",
        "CREATE TABLE other (id int PRIMARY KEY, note text)",
        "INSERT INTO other SELECT i, 'note ' || i FROM generate_series(1, 5) i",
    )
    return database


# --- tables that can't be polled ---------------------------------------------------------------


def test_what_is_wrong_with_a_table_is_said_and_stops_it_alone(
    tmp_path: Path, items: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    items.execute(
        "CREATE TABLE nokey (id int, note text)",
        "INSERT INTO nokey VALUES (1, 'a')",
        "CREATE TABLE unordered (id int PRIMARY KEY, label text)",
        "INSERT INTO unordered VALUES (1, 'a')",
        "ALTER TABLE other ADD at timestamptz",
    )
    extra = (
        f'{CURSOR}[sources.shop.table."public.unordered"]\ncursor = "label"\n'
        '[sources.shop.table."public.other"]\ncursor = "at"\n'
    )
    config = polling_config(lake=lake, dsn=items.dsn, extra=extra)
    found = ingestd(tmp_path, "check", config)
    assert_fails(found, r"public\.nokey  no primary key", r"ADD PRIMARY KEY .*key")
    assert_fails(found, r"'label' text can't be a cursor: possible types are", "entire table")
    assert re.search(
        r"^warn +shop +table public\.other, cursor.*'at' may be null", found.out, re.MULTILINE
    )
    assert 'ALTER COLUMN "at" SET NOT NULL' in found.out
    assert 'CREATE INDEX CONCURRENTLY ON "public"."other" ("at");' in found.out

    daemon = make_daemon(config)
    daemon.start()
    nokey, unordered = TableId("public", "nokey"), TableId("public", "unordered")
    assert "no primary key" in await_state(lake, nokey, "stopped")
    assert "can't be a cursor" in await_state(lake, unordered, "stopped")
    await_equal(items, lake, ITEM, OTHER)
    items.execute("INSERT INTO other VALUES (100, 'null cursor', NULL)")
    items.execute("ALTER TABLE nokey ADD PRIMARY KEY (id)", "INSERT INTO nokey VALUES (2, 'b')")
    await_equal(items, lake, ITEM, OTHER, nokey)
    assert_change_log_is_sound(items, lake)


# --- cursors and clocks ------------------------------------------------------------------------


@pytest.mark.thorough
def test_cursors_that_go_back_and_clocks_that_jump_cost_nothing(
    items: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(polling_config(lake=lake, dsn=items.dsn, extra=CURSOR))
    daemon.start_ready()
    await_equal(items, lake, ITEM)
    items.execute("INSERT INTO item VALUES (1001, 'of the future', now() + interval '30 years')")
    await_equal(items, lake, ITEM)
    items.execute("INSERT INTO item VALUES (1002, 'ordinary')")
    items.execute("UPDATE item SET at = now() - interval '1 year', note = 'set back' WHERE id < 9")
    items.execute("INSERT INTO item VALUES (1003, 'of the past', 'epoch')")
    items.execute("INSERT INTO item VALUES (1004, 'of no time', NULL), (1005, 'ever', 'infinity')")
    await_equal(items, lake, ITEM)
    items.execute("UPDATE item SET at = now(), note = 'right again' WHERE id IN (1001, 1005)")
    items.execute("INSERT INTO item VALUES (1006, 'before all', '-infinity')")
    items.execute("INSERT INTO item VALUES (1007, 'ordinary')")
    await_equal(items, lake, ITEM)
    counts = {i: row_ids(lake).count(i) for i in set(row_ids(lake))}
    twice = {i for i, count in counts.items() if count > 1}
    assert twice == {*range(1, 9), 1001, 1005}
    assert max(counts.values()) == 2
    assert_change_log_is_sound(items, lake)


@pytest.mark.thorough
def test_notify_polls_at_once(items: Database, lake: Path, make_daemon: MakeDaemon) -> None:
    source = 'listen = "shop changed"\n'
    daemon = make_daemon(
        polling_config(lake=lake, dsn=items.dsn, interval="10m", source_extra=source, extra=CURSOR)
    )
    daemon.start_ready()
    await_equal(items, lake, ITEM, OTHER)
    for number in range(1001, 1006):
        items.execute(
            f"INSERT INTO item VALUES ({number}, 'now')",
            f"INSERT INTO other VALUES ({number}, 'now')",
            'NOTIFY "shop changed"',
        )
        await_equal(items, lake, ITEM, OTHER)


# --- tables that change in mid run --------------------------------------------------------------


@pytest.mark.thorough
def test_truncated_tables_are_resnapshotted(
    items: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(polling_config(lake=lake, dsn=items.dsn, extra=CURSOR))
    daemon.start_ready()
    await_equal(items, lake, ITEM, OTHER)
    items.execute("TRUNCATE item")
    await_equal(items, lake, ITEM)
    assert ops_of(lake, ITEM).count("t") == 2
    items.execute("INSERT INTO item SELECT i, 'new' FROM generate_series(1, 3) i")
    await_equal(items, lake, ITEM)
    with items.connect(autocommit=False) as connection:
        connection.execute("TRUNCATE item, other")
        connection.execute("INSERT INTO item SELECT i, 'reloaded' FROM generate_series(3, 30) i")
        connection.execute("INSERT INTO other SELECT i, 'reloaded' FROM generate_series(3, 30) i")
        connection.execute("SAVEPOINT s")
        connection.execute("UPDATE item SET note = 'once more' WHERE id = 4")
        connection.commit()
    await_equal(items, lake, ITEM, OTHER)
    assert daemon.sigterm() == 0
    items.execute("TRUNCATE other", "INSERT INTO other VALUES (7, 'while away')")
    daemon.start_ready()
    await_equal(items, lake, ITEM, OTHER)
    assert_change_log_is_sound(items, lake)


@pytest.mark.thorough
def test_columns_that_come_go_and_change(
    items: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(polling_config(lake=lake, dsn=items.dsn, extra=CURSOR + SWEPT))
    daemon.start_ready()
    await_equal(items, lake, ITEM, OTHER)
    for statement in (
        "ALTER TABLE item ADD size int DEFAULT 7",
        "ALTER TABLE item ADD label text",
        "ALTER TABLE item RENAME note TO remark",
        "ALTER TABLE item DROP COLUMN label",
        "ALTER TABLE item ALTER size TYPE bigint",
        "ALTER TABLE item ALTER size TYPE text",
        "ALTER TABLE item RENAME id TO number",
    ):
        items.execute(statement)
        key = "number" if "number" in statement else "id"
        items.execute(
            f"UPDATE item SET at = now() WHERE {key} = 1",
            "INSERT INTO item SELECT max(number) + 1 FROM item".replace("number", key),
        )
        await_equal(items, lake, ITEM, OTHER)
    items.execute(
        "DROP TABLE item",
        "CREATE TABLE item (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), at timestamptz)",
        "INSERT INTO item SELECT FROM generate_series(1, 3)",
    )
    await_equal(items, lake, ITEM, OTHER)
    items.execute("DELETE FROM item WHERE id = (SELECT min(id::text)::uuid FROM item)")
    items.execute("INSERT INTO item DEFAULT VALUES")
    await_equal(items, lake, ITEM, OTHER)
    assert_change_log_is_sound(items, lake)


# --- rights, locks, time limits -----------------------------------------------------------------


@pytest.mark.thorough
def test_a_right_that_is_taken_stops_its_table_alone(
    items: Database, lake: Path, make_daemon: MakeDaemon, stranger: str
) -> None:
    items.execute(f"GRANT SELECT ON item, other TO {stranger}")
    dsn = f"{items.dsn} user={stranger}"
    daemon = make_daemon(polling_config(lake=lake, dsn=dsn, extra=CURSOR + SWEPT))
    daemon.start_ready()
    await_equal(items, lake, ITEM, OTHER)
    items.execute(f"REVOKE SELECT ON item FROM {stranger}")
    items.execute("INSERT INTO item VALUES (100, 'meanwhile')", "DELETE FROM item WHERE id = 5")
    reason = await_state(lake, ITEM, "stopped")
    assert "no privilege to read it" in reason or "permission denied" in reason
    items.execute("INSERT INTO other VALUES (100, 'meanwhile')")
    await_equal(items, lake, OTHER)
    [table] = [
        t
        for t in (daemon.status() or {})["sources"]["shop"]["tables"]
        if t["table"] == "public.item"
    ]
    assert "GRANT SELECT" in table["remedy"]
    items.execute(f"GRANT SELECT ON item TO {stranger}")
    daemon.sigkill()  # it would retry automatically a minute later
    daemon.start()
    await_equal(items, lake, ITEM, OTHER)
    assert_change_log_is_sound(items, lake)


@contextmanager
def locked(source: Database, table: str) -> Iterator[None]:
    with source.connect(autocommit=False) as connection:
        connection.execute(f"LOCK TABLE {table}".encode())
        yield
        connection.rollback()


@pytest.mark.thorough
def test_a_lock_holds_up_its_table_alone(
    items: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    limit = 'lock_timeout = "100ms"\n'
    config = polling_config(lake=lake, dsn=items.dsn, source_extra=limit, extra=CURSOR + SWEPT)
    daemon = make_daemon(config)
    daemon.start_ready()
    await_equal(items, lake, ITEM, OTHER)
    items.execute("INSERT INTO item VALUES (100, 'before')", "DELETE FROM item WHERE id = 5")
    with locked(items, "item"):
        items.execute("INSERT INTO other VALUES (100, 'meanwhile')")
        await_equal(items, lake, OTHER)
        waits = (
            "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 'item'::regclass"
        )
        await_until(lambda: items.value(waits), LIMIT_S, "a poll to wait for the lock")
        items.execute("INSERT INTO other VALUES (101, 'meanwhile')")
        await_equal(items, lake, OTHER)
    await_equal(items, lake, ITEM, OTHER)
    assert entry(lake, ITEM)["state"] == "live"

    with locked(items, "item"):
        reason = await_state(lake, ITEM, "stopped")
        assert "could not be polled 5 times in a row" in reason
        items.execute("INSERT INTO other VALUES (102, 'meanwhile')")
        await_equal(items, lake, OTHER)
    items.execute("INSERT INTO item VALUES (101, 'after')")
    daemon.sigkill()  # it would retry automatically a minute later
    daemon.start()
    await_equal(items, lake, ITEM, OTHER)
    assert_change_log_is_sound(items, lake)


@pytest.mark.thorough
def test_a_statement_timeout_that_is_too_small_is_named(
    items: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    items.execute("INSERT INTO other SELECT i, 'x' FROM generate_series(100, 400000) i")
    small = polling_config(
        lake=lake, dsn=items.dsn, source_extra='statement_timeout = "20ms"', extra=CURSOR
    )
    daemon = make_daemon(small)
    daemon.start()
    await_state(lake, OTHER, "live")
    items.execute("UPDATE other SET note = 'y' WHERE id % 2 = 0")
    reason = await_state(lake, OTHER, "stopped")
    assert "could not be polled 5 times in a row" in reason
    assert "sent nothing for" in reason
    items.execute("INSERT INTO item VALUES (100, 'meanwhile')")
    await_equal(items, lake, ITEM)
    assert daemon.sigterm() == 0
    daemon.write_config(polling_config(lake=lake, dsn=items.dsn, extra=CURSOR))
    daemon.start()
    changed = items.value("SELECT count(*) FROM other WHERE note = 'y'")

    def given() -> int:
        raw = read_raw(str(lake), "shop", OTHER)
        return len(set(raw["id"].filter(pc.equal(raw["note"], "y")).to_pylist()))

    await_until(lambda: given() == changed, LIMIT_S, lambda: f"{given()} of {changed}")


def ops_of(lake: Path, table: TableId) -> list[str]:
    found: list[str] = read_raw(str(lake), "shop", table)["_cdc_op"].to_pylist()
    return found


# --- servers ------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_one_writer_a_second_daemon_reports_the_first(
    items: Database, lake: Path, tmp_path: Path, make_daemon: MakeDaemon
) -> None:
    config = polling_config(lake=lake, dsn=items.dsn, extra=CURSOR)
    other_lake = polling_config(lake=tmp_path / "other", dsn=items.dsn, extra=CURSOR)
    first, second = make_daemon(config, "first"), make_daemon(other_lake, "second")
    first.start_ready()
    second.start()
    told = not_ready(second, "backing_off")
    assert "another ingestd polls this database under the same name" in told
    assert "stop the other one" in str(failed_events(second)[0]["remedy"])
    assert first.sigterm() == 0
    second.await_ready()
    await_equal(items, tmp_path / "other", ITEM, OTHER)


@pytest.mark.thorough
def test_a_standby_is_polled_during_transactions_on_the_primary(
    own_postgres: PostgresServer, lake: Path, make_daemon: MakeDaemon
) -> None:
    """A standby knows of a subtransaction only what its primary has logged."""
    primary = with_shop(own_postgres)
    orders = TableId("public", "orders")
    with copy_of(own_postgres) as server:
        standby = shop_on(server)
        extra = f'[sources.shop.table."public.orders"]\n{SWEPT}'
        daemon = make_daemon(polling_config(lake=lake, dsn=standby.dsn, extra=extra))
        daemon.start_ready()
        await_equal(standby, lake, orders)
        with primary.connect(autocommit=False) as slow, primary.connect(autocommit=False) as deep:
            slow.execute("INSERT INTO orders VALUES (1001, 'slow')")
            for number in range(80):  # more than a backend keeps apart
                deep.execute("SAVEPOINT s")
                deep.execute("INSERT INTO orders VALUES (%s, 'deep')", [2000 + number])
                if number % 3 == 0:
                    deep.execute("ROLLBACK TO s")
            primary.execute("INSERT INTO orders VALUES (3001, 'quick')")
            primary.execute("DELETE FROM orders WHERE id = 7")
            await_replayed(own_postgres, server)
            await_equal(standby, lake, orders)
            deep.commit()
            primary.execute("UPDATE orders SET note = 'quick' WHERE id = 8")
            await_replayed(own_postgres, server)
            await_equal(standby, lake, orders)
            slow.execute("UPDATE orders SET note = 'slow' WHERE id = 9")
            slow.commit()
        await_replayed(own_postgres, server)
        await_equal(standby, lake, orders)
        assert_change_log_is_sound(standby, lake)
        given = [i for i in row_ids(lake, orders) if i > 1000]
        assert sorted(given) == sorted(set(given))
        assert daemon.sigterm() == 0


@pytest.mark.thorough
def test_a_query_that_replay_cancels_is_made_again(
    own_postgres: PostgresServer, lake: Path, make_daemon: MakeDaemon
) -> None:
    primary = with_shop(own_postgres)
    orders = TableId("public", "orders")
    primary.execute("INSERT INTO orders SELECT i, 'many' FROM generate_series(101, 60000) i")
    impatient = {"hot_standby_feedback": "off", "max_standby_streaming_delay": "0"}
    with copy_of(own_postgres, settings=impatient) as server:
        standby = shop_on(server)
        daemon = make_daemon(polling_config(lake=lake, dsn=standby.dsn, interval="20ms"))
        daemon.start_ready()
        await_state(lake, orders, "live")
        last = 0

        def write_and_vacuum() -> bool:
            nonlocal last
            last += 1
            primary.execute(
                f"UPDATE orders SET note = 'write {last}' WHERE id % 1000 = {last}",
                "VACUUM orders",
            )
            # It cancels a query, and ends a session that is between two.
            return any("conflict with recovery" in str(e["reason"]) for e in failed_events(daemon))

        await_until(write_and_vacuum, LIMIT_S, lambda: f"a conflict\n{daemon.tail()}")
        failed = failed_events(daemon)
        assert all(e["state"] == "backing_off" for e in failed)
        assert "hot_standby_feedback" in str([e["remedy"] for e in failed])
        await_replayed(own_postgres, server)
        await_equal(standby, lake, orders)
        assert_change_log_is_sound(standby, lake)

"""Rows that an UPDATE moves into a publication's row filter: an INSERT without TOASTed values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ingestd.model.schema import Column, Table, TableId
from ingestd.postgres.wal.slots.row_filters import can_fail
from ingestd.testing.oracle.comparison import await_caught_up
from tests.harness.command_line import run_command
from tests.harness.compare import assert_lake_equals_source, registry
from tests.harness.config import wal_config
from tests.harness.databases import skip_without_lists
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60
BIG = TableId("public", "big")
OUTSIDE = 1000
"""Rows that the filter does not let through, of 3,000."""
REMEDY = "REPLICA IDENTITY FULL"


@pytest.fixture
def filtered(database: Database) -> Database:
    skip_without_lists(database)
    database.execute(
        "CREATE TABLE big (id int PRIMARY KEY, v int, body text)",
        "ALTER TABLE big ALTER body SET STORAGE EXTERNAL",
        "INSERT INTO big SELECT i, i, repeat(md5(i::text), 100) FROM generate_series(1, 3000) i",
        f"CREATE PUBLICATION {database.name} FOR TABLE big WHERE (id > {OUTSIDE})",
    )
    return database


def config(database: Database, lake: Path) -> str:
    names = [f'slot = "{database.name}"', f'publication = "{database.name}"']
    lines = [*names, 'discover_interval = "1s"']
    return wal_config(
        tables=("public.big",), lake=lake, dsn=database.dsn, source_extra="\n".join(lines)
    )


def last(lake: Path) -> dict[str, Any]:
    return registry(lake)[-1]


def await_state(daemon: Daemon, lake: Path, state: str) -> None:
    await_until(lambda: bool(registry(lake)) and last(lake)["state"] == state, LIMIT_S, daemon.tail)


def assert_lake_has_what_is_published(database: Database, lake: Path) -> None:
    """Removes the other rows, of which nothing was ever sent."""
    database.execute(f"DELETE FROM big WHERE id <= {OUTSIDE}")
    assert_lake_equals_source(database, lake, tables=[BIG], slot=database.name)


@pytest.mark.thorough
def test_i7_a_row_moved_into_the_filter_without_values_stops(
    filtered: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    daemon = make_daemon(config(filtered, lake))
    said = run_command(daemon.config_path, "check").stdout
    warned = "an UPDATE that moves a row into the filter without its TOASTed values stops the table"
    assert warned in said
    assert REMEDY in said
    daemon.start_ready()
    # within the filter, out of it, and new in it: all that is needed comes, or is in the lake
    filtered.execute(
        "UPDATE big SET v = -v WHERE id = 2000",
        "UPDATE big SET id = 7000 WHERE id = 2001",
        "UPDATE big SET id = -3 WHERE id = 2002",
        "UPDATE big SET id = 7001, body = repeat('n', 9000) WHERE id = 4",
        "INSERT INTO big VALUES (7002, 1, repeat('n', 9000))",
    )
    filtered.execute("UPDATE big SET id = 7003 WHERE id = 5")
    await_state(daemon, lake, "stopped")
    assert "moved a row into the publication's row filter" in last(lake)["reason"]
    [event] = await_until(lambda: daemon.events("table.stopped"), LIMIT_S, daemon.tail)
    assert REMEDY in event["remedy"]
    filtered.execute("ALTER TABLE big REPLICA IDENTITY FULL")
    assert "ok" in run_command(daemon.config_path, "check").stdout
    snapshot = run_command(daemon.config_path, "snapshot", "shop", "public.big")
    assert snapshot.returncode == 0, snapshot.stdout + snapshot.stderr
    filtered.execute("UPDATE big SET id = id + 8000 WHERE id BETWEEN 6 AND 9")
    assert_lake_has_what_is_published(filtered, lake)
    assert last(lake)["state"] == "live"


@pytest.mark.thorough
def test_changes_before_the_remedy_do_not_stop_the_table_again(
    filtered: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    """It precedes the re-read: in a backlog, for example."""
    daemon = make_daemon(config(filtered, lake))
    daemon.start_ready()
    filtered.execute("UPDATE big SET id = 5000 WHERE id = 1")
    await_state(daemon, lake, "stopped")
    daemon.sigkill()
    for row in range(2, 40):
        filtered.execute(f"UPDATE big SET id = {5000 + row} WHERE id = {row}")
    filtered.execute("ALTER TABLE big REPLICA IDENTITY FULL")
    told = len(registry(lake))
    daemon.start()
    await_state(daemon, lake, "live")
    assert_lake_has_what_is_published(filtered, lake)
    assert "stopped" not in {row["state"] for row in registry(lake)[told:]}


def test_a_hidden_value_is_not_missed(
    filtered: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    hidden = '[sources.shop.table."public.big"]\nmask_columns = { body = "null" }\n'
    daemon = make_daemon(config(filtered, lake) + hidden)
    daemon.start_ready()
    filtered.execute("UPDATE big SET id = 7003 WHERE id = 5")
    with filtered.connect() as connection:
        await_caught_up(connection, filtered.name, LIMIT_S)
    assert not daemon.events("table.stopped")


CERTAIN = (
    "id > 1000",
    "id BETWEEN -5 AND 1000 AND note <> ''",
    "note IN ('a', 'it''s (x) AND \\ y')",
    "(code = 'a' OR code = 'b') AND id IN (1, 2) OR code IS NULL",
    "code = 'a'",
    "NOT flag OR flag IS NULL",
    "flag",
    "at >= '2026-01-01' AND day < '2026-01-01'",
    "amount <> 1.50 AND big = '-9223372036854775808'",
    "key = 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'",
    "doc IS NOT NULL",
    "\"A b\" <> '0'",
)
UNCERTAIN = ("100 / id > 1", "big + id > 1", "doc ? 'x'", "note > 'm'", "length(code) = 3")


def test_filters_that_can_not_fail_are_known_by_their_texts(database: Database) -> None:
    skip_without_lists(database)
    types = "id int, big bigint, note text, code varchar(9), flag bool, at timestamptz, day date"
    database.execute(f'CREATE TABLE f ({types}, amount numeric, key uuid, doc jsonb, "A b" float8)')
    columns = tuple(
        Column(name, oid, -1, pa.string())
        for name, oid in database.rows(
            "SELECT attname::text, atttypid::int8 FROM pg_attribute WHERE attrelid = 'f'::regclass"
        )
    )
    for number, condition in enumerate((*CERTAIN, *UNCERTAIN)):
        database.execute(f"CREATE PUBLICATION f{number} FOR TABLE f WHERE ({condition})")
        text = database.value(
            "SELECT pg_get_expr(prqual, prrelid) FROM pg_publication_rel r JOIN pg_publication p"
            " ON p.oid = prpubid WHERE pubname = %s",
            f"f{number}",
        )
        table = Table(TableId("public", "f"), 1, columns, row_filter=text)
        assert can_fail(table) is (condition in UNCERTAIN), text

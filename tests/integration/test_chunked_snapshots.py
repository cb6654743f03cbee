"""Tables read in chunks while they are written to (design section 8.9, way b; I6)."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.model.schema import TableId
from tests.harness.command_line import run_command
from tests.harness.compare import assert_lake_equals_source, registry
from tests.harness.config import wal_config
from tests.harness.toast_writers import ToastWriters, create_big
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pyarrow as pa

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 90
ROWS = 12_000
BIG = TableId("public", "big")


def config(database: Database, lake: Path, *extra: str) -> str:
    names = [
        f'slot = "{database.name}"',
        f'publication = "{database.name}"',
        'discover_interval = "1s"',
        'snapshot_chunk = "1MB"',
    ]
    return wal_config(
        epoch='max_bytes = "2MB"',
        lake=lake,
        dsn=database.dsn,
        source_extra="\n".join([*names, *extra]),
    )


def states(lake: Path) -> dict[str, str]:
    return {row["table"]: row["state"] for row in registry(lake)}


def raw(lake: Path) -> pa.Table:
    return read_raw(str(lake), "shop", BIG)


def markers(lake: Path) -> int:
    found: int = raw(lake)["_cdc_seq"].to_pylist().count(-1)
    return found


def positions_of_rows_read(lake: Path) -> set[int]:
    rows = raw(lake)
    return {
        lsn
        for op, lsn in zip(rows["_cdc_op"].to_pylist(), rows["_cdc_lsn"].to_pylist(), strict=True)
        if op == "r"
    }


def ask(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(daemon.config_path, "snapshot", *arguments)


def kept(lake: Path) -> int:
    """How often it was recorded what of a snapshot is durable."""
    return sum(row["progress"] is not None for row in registry(lake))


def await_more_kept(lake: Path, before: int, daemon: Daemon) -> None:
    await_until(lambda: kept(lake) > before, LIMIT_S, daemon.tail)


def await_live(daemon: Daemon, lake: Path, tables: Sequence[str] = ("public.big",)) -> None:
    await_until(lambda: all(states(lake).get(t) == "live" for t in tables), LIMIT_S, daemon.tail)


@pytest.mark.thorough
def test_i6_first_load_in_chunks_under_writes(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    create_big(database, ROWS)
    with ToastWriters(database, ROWS) as writers:
        daemon = make_daemon(config(database, lake, 'snapshot_chunked_above = "0"'))
        daemon.start()
        await_live(daemon, lake)
        await_until(lambda: writers.transactions > 500, LIMIT_S, daemon.tail)
    assert_lake_equals_source(database, lake, slot=database.name)
    assert len(positions_of_rows_read(lake)) > 5
    assert markers(lake) == 1


def test_i6_kills_while_chunks_are_read(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    """What was durable is not read again; deletes and unsent values included."""
    create_big(database, ROWS)
    with ToastWriters(database, ROWS):
        daemon = make_daemon(
            config(database, lake, 'snapshot_chunked_above = "0"', "snapshot_workers = 1")
        )
        for _ in range(4):
            before = kept(lake)
            daemon.start()
            await_more_kept(lake, before, daemon)
            daemon.sigkill()
        assert states(lake)["public.big"] == "snapshotting"
        daemon.start()
        await_live(daemon, lake)
    assert_lake_equals_source(database, lake, slot=database.name)
    assert markers(lake) == 1  # it never restarted


@pytest.mark.thorough
def test_i6_a_killed_snapshot_at_one_point_resumes_in_chunks(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    create_big(database, 2 * ROWS)
    with ToastWriters(database, 2 * ROWS):
        daemon = make_daemon(config(database, lake, "snapshot_workers = 1"))
        daemon.start()
        await_until(lambda: any(r["progress"] for r in registry(lake)), LIMIT_S, daemon.tail)
        daemon.sigkill()
        assert states(lake)["public.big"] == "snapshotting"
        point = next(r["snapshot_lsn"] for r in registry(lake) if r["snapshot_lsn"])
        daemon.start()
        await_live(daemon, lake)
    assert_lake_equals_source(database, lake, slot=database.name)
    assert len(positions_of_rows_read(lake)) > 1
    assert point in positions_of_rows_read(lake)


@pytest.mark.thorough
def test_i6_on_demand_while_a_transaction_is_open_all_the_time(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    create_big(database, ROWS)
    daemon = make_daemon(config(database, lake))
    daemon.start_ready()
    with database.connect(autocommit=False) as held:
        held.execute("UPDATE big SET n = -1 WHERE n % 100 = 0")
        held.execute("DELETE FROM big WHERE n % 100 = 1")
        with ToastWriters(database, ROWS):
            asked = ask(daemon, "shop", "public.big")
            assert asked.returncode == 0, asked.stdout + asked.stderr
            await_until(lambda: markers(lake) == 2, LIMIT_S, daemon.tail)
        await_live(daemon, lake)
        held.commit()
    assert_lake_equals_source(database, lake, slot=database.name)


@pytest.mark.thorough
def test_a_rewrite_during_a_snapshot_restarts_it_without_loss(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    create_big(database, 2 * ROWS)
    with ToastWriters(database, 2 * ROWS):
        daemon = make_daemon(config(database, lake, 'snapshot_chunked_above = "0"'))
        daemon.start()
        await_until(lambda: any(r["progress"] for r in registry(lake)), LIMIT_S, daemon.tail)
        database.execute("VACUUM FULL big", "ALTER TABLE big ADD more int DEFAULT 7")
        await_live(daemon, lake)
    assert_lake_equals_source(database, lake, slot=database.name)


def test_i6_a_partition_name_reused_by_a_table_is_not_mixed_up(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    """A chunk is of a relation, whatever that is called by then."""
    database.execute(
        "CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (1000000)",
        "INSERT INTO parts SELECT i, repeat('x', 1000) FROM generate_series(1, 40000) i",
    )
    daemon = make_daemon(
        config(database, lake, 'snapshot_chunked_above = "0"', "snapshot_workers = 1")
    )
    daemon.start()
    await_until(lambda: any(r["progress"] for r in registry(lake)), LIMIT_S, daemon.tail)
    with database.connect(autocommit=False) as session:
        session.execute("ALTER TABLE parts_1 RENAME TO parts_old")
        session.execute("CREATE TABLE parts_1 (id int PRIMARY KEY, v text)")
        session.execute("INSERT INTO parts_1 VALUES (77, 'foreign')")
    await_live(daemon, lake, ["public.parts", "public.parts_1"])
    assert_lake_equals_source(database, lake, slot=database.name)


FAR_KEY = "(SELECT string_agg(md5(i::text || g), '') FROM generate_series(1, 80) g)"
VALUES = "i, repeat('b', 3000), repeat('p', 500) FROM generate_series(1, 3000) i"
ODD_KEYS = {
    "stored_apart": (
        "CREATE TABLE big (k text PRIMARY KEY, v int, body text, pad text)",
        "ALTER TABLE big ALTER k SET STORAGE EXTERNAL",
        f"INSERT INTO big SELECT {FAR_KEY}, {VALUES}",
    ),
    "there_in_another_table": (
        "CREATE TABLE big (k int PRIMARY KEY, v int, body text, pad text)",
        "CREATE TABLE child (PRIMARY KEY (k)) INHERITS (big)",
        "INSERT INTO child SELECT i, i, 'not this one', '' FROM generate_series(2000, 3000) i",
        f"INSERT INTO big SELECT i, {VALUES}",
    ),
    "domain_over_enum": (
        "CREATE TYPE mood AS ENUM ('a', 'b')",
        "CREATE DOMAIN mood_of AS mood",
        "CREATE TABLE big (k mood_of, i int, v int, body text, pad text, PRIMARY KEY (k, i))",
        f"INSERT INTO big SELECT (enum_range(null::mood))[1 + i % 2], i, {VALUES}",
    ),
    "composite": (
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE TABLE big (i int, k pair, v int, body text, pad text, PRIMARY KEY (i, k))",
        f"INSERT INTO big SELECT i, ROW(i, 'x'::text)::pair, {VALUES}",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("key", ODD_KEYS)
def test_i6_a_row_whose_values_were_not_sent_is_found_by_its_key(
    database: Database, make_daemon: MakeDaemon, lake: Path, key: str
) -> None:
    """Updated after a kill, before it was read."""
    *made, filled = ODD_KEYS[key]
    database.execute(*made, "ALTER TABLE big ALTER body SET STORAGE EXTERNAL", filled)
    small = ['snapshot_chunked_above = "0"', "snapshot_workers = 1"]
    text = config(database, lake, *small).replace('chunk = "1MB"', 'chunk = "50kB"')
    daemon = make_daemon(text.replace('"public.*"', '"public.big"'))
    daemon.start()
    await_until(lambda: kept(lake) > 0, LIMIT_S, daemon.tail)
    daemon.sigkill()
    assert states(lake)["public.big"] == "snapshotting"
    database.execute("UPDATE ONLY big SET v = -v WHERE v > 2900")
    daemon.start_ready(LIMIT_S)
    await_live(daemon, lake)
    database.execute("DROP TABLE IF EXISTS child")
    assert_lake_equals_source(database, lake, tables=[BIG], slot=database.name)


def test_i8_keys_of_any_type_are_read_again(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    """By types that the role can't name, collations that differ from their domain's, odd values."""
    database.execute(
        'CREATE DOMAIN code AS text COLLATE "C"',
        "CREATE TYPE mood AS ENUM ('a''b', 'c\\d')",
        "CREATE DOMAIN mood_of AS mood",
        "CREATE DOMAIN my_mood AS mood_of",
        "CREATE TABLE keyed (c code COLLATE \"POSIX\", m mood, d my_mood DEFAULT 'a''b',"
        " f float8, t timestamptz, b bytea,"
        " n numeric, v int, big text, PRIMARY KEY (c, m, d, f, t, b, n))",
        "ALTER TABLE keyed ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO keyed (c, m, f, t, b, n, v, big)"
        " SELECT 'k' || i, CASE i % 2 WHEN 0 THEN 'a''b' ELSE 'c\\d' END::mood,"
        " CASE i % 3 WHEN 0 THEN 'NaN' WHEN 1 THEN '-Infinity' ELSE 0.1 * i END,"
        " CASE i % 3 WHEN 0 THEN 'infinity' ELSE now() END, int4send(i), i / 7.0, 0,"
        " repeat(md5(i::text), 100) FROM generate_series(1, 3000) i",
    )
    daemon = make_daemon(config(database, lake, 'snapshot_chunked_above = "0"'))
    daemon.start()
    for _ in range(30):
        database.execute("UPDATE keyed SET v = v + 1 WHERE v % 7 = 0 OR random() < 0.1")
    await_live(daemon, lake, ["public.keyed"])
    assert_lake_equals_source(database, lake, slot=database.name)

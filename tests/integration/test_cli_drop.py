"""`ingestd drop`: what a source has on the server goes, and nothing else."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

from ingestd import cli
from ingestd.model.schema import TableId
from ingestd.postgres.connection.control_connection import ControlConnection
from ingestd.testing.oracle.comparison import compare_source
from tests.harness.config import polling_config, wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from psycopg import AsyncConnection
    from typer.testing import Result

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 120.0
ORDERS = TableId("public", "orders")


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, note text)",
        "INSERT INTO orders SELECT i, 'n' || i FROM generate_series(1, 100) i",
    )
    return database


def config(shop: Database, lake: Path, extra: str = "", dsn: str | None = None) -> str:
    names = f'slot = "{shop.name}"\npublication = "{shop.name}"\n{extra}'
    return wal_config(lake=lake, dsn=dsn or shop.dsn, source_extra=names)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "drop.toml"
    path.write_text(text)
    return path


def drop(path: Path, *arguments: str, asked: str = "", source: str = "shop") -> Result:
    command = ["drop", source, "-c", str(path), *arguments]
    return CliRunner().invoke(cli.app, command, input=asked)


def make(shop: Database, *, tables: str = "TABLE orders") -> None:
    shop.execute(
        f"CREATE PUBLICATION {shop.name} FOR {tables}",
        f"SELECT pg_create_logical_replication_slot('{shop.name}', 'pgoutput')",
    )


def publications(shop: Database) -> list[str]:
    return [name for (name,) in shop.rows("SELECT pubname::text FROM pg_publication")]


@pytest.mark.thorough
def test_a_dropped_source_is_resnapshotted_by_the_next_run(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(config(shop, lake))
    daemon.start_ready(LIMIT_S)
    path = daemon.config_path
    refused = drop(path, "--yes")
    assert refused.exit_code == 1
    assert f"a daemon works on slot {shop.name!r}" in refused.stderr
    assert "remedy: stop it first" in refused.stderr
    assert daemon.sigterm() == 0
    assert shop.slots() == [shop.name]

    for answer in ("n\n", "\n"):
        declined = drop(path, asked=answer)
        assert declined.exit_code == 1
        assert f"drop slot {shop.name} (it holds back" in declined.stdout
        assert f"drop publication {shop.name} (1 tables)" in declined.stdout
        assert f"the lake is not changed: {lake}/shop" in declined.stdout
        assert "re-snapshots all tables" in declined.stdout
    assert (shop.slots(), publications(shop)) == ([shop.name], [shop.name])

    done = drop(path, asked="y\n")
    assert done.exit_code == 0, done.output
    assert f"dropped slot {shop.name}\ndropped publication {shop.name}\n" in done.stdout
    assert (shop.slots(), publications(shop)) == ([], [])
    again = drop(path)
    assert again.exit_code == 0
    assert "no slot or publication to drop" in again.stdout

    shop.execute("UPDATE orders SET note = 'unseen'", "DELETE FROM orders WHERE id > 90")
    daemon.start()

    def is_equal() -> bool:
        with shop.connect() as connection:
            return all(c.is_equal for c in compare_source(connection, str(lake), "shop", [ORDERS]))

    await_until(is_equal, LIMIT_S, lambda: f"the lake to equal the source\n{daemon.tail()}")
    assert daemon.sigterm() == 0


def test_what_ingestd_does_not_manage_is_left(shop: Database, tmp_path: Path, lake: Path) -> None:
    make(shop)
    path = written(tmp_path, config(shop, lake, "manage = false"))
    done = drop(path, "--yes")
    assert done.exit_code == 0, done.output
    assert f"    SELECT pg_catalog.pg_drop_replication_slot('{shop.name}');" in done.stdout
    assert f'    DROP PUBLICATION "{shop.name}";' in done.stdout
    assert "dropped" not in done.stdout
    assert (shop.slots(), publications(shop)) == ([shop.name], [shop.name])


def test_what_is_none_of_ingestds_is_left(
    shop: Database, tmp_path: Path, lake: Path, stranger: str
) -> None:
    path = written(tmp_path, config(shop, lake))
    shop.execute(
        f"CREATE PUBLICATION {shop.name} FOR ALL TABLES",
        f"SELECT pg_create_physical_replication_slot('{shop.name}')",
    )
    try:
        done = drop(path, "--yes")
    finally:  # it is no database's, and fails if it was dropped
        shop.execute(f"SELECT pg_drop_replication_slot('{shop.name}')")
    assert done.exit_code == 0, done.output
    assert "for all tables" in done.stdout
    assert "not a slot of ingestd" in done.stdout
    assert publications(shop) == [shop.name]

    shop.execute(f"DROP PUBLICATION {shop.name}")
    make(shop)
    shop.execute(f"ALTER ROLE {stranger} REPLICATION")
    text = config(shop, lake, dsn=make_conninfo(shop.dsn, user=stranger))
    done = drop(written(tmp_path, text), "--yes")
    assert done.exit_code == 0, done.output
    assert "belongs to another role" in done.stdout
    assert (shop.slots(), publications(shop)) == ([], [shop.name])


def test_a_slot_in_use_is_not_dropped(shop: Database, tmp_path: Path, lake: Path) -> None:
    make(shop)
    path = written(tmp_path, config(shop, lake))
    reader = subprocess.Popen(
        [
            *(str(shop.server.program("pg_recvlogical")), "-d", shop.dsn, "-f", "/dev/null"),
            *("--slot", shop.name, "--start", "-o", "proto_version=1"),
            *("-o", f"publication_names={shop.name}"),
        ]
    )
    try:
        active = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
        await_until(lambda: shop.value(active, shop.name), LIMIT_S, "the slot to be read")
        refused = drop(path, "--yes")
    finally:
        reader.terminate()
        reader.wait()
    assert refused.exit_code == 1
    assert f"slot '{shop.name}' is in use by pid" in refused.stderr
    assert "stop that client" in refused.stderr
    assert (shop.slots(), publications(shop)) == ([shop.name], [shop.name])


def test_a_polled_source_has_nothing_to_drop(shop: Database, tmp_path: Path, lake: Path) -> None:
    path = written(tmp_path, polling_config(lake=lake, dsn=shop.dsn))
    done = drop(path)
    assert done.exit_code == 0
    assert "no slot or publication to drop" in done.stdout
    assert drop(path, source="shpo").exit_code == 2


def test_one_that_stops_at_a_loss_says_so(shop: Database, tmp_path: Path, lake: Path) -> None:
    make(shop)
    done = drop(written(tmp_path, config(shop, lake, 'slot_lost = "stop"')), "--yes")
    assert done.exit_code == 0, done.output
    assert 'stops because of slot_lost = "stop"' in done.stdout


def test_a_session_slow_to_end_is_not_taken_for_a_daemon(
    shop: Database, tmp_path: Path, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It claims the source to list what exists, and once more to drop it."""
    make(shop)
    lasting: list[AsyncConnection[Any]] = []

    async def close_later(self: ControlConnection) -> None:
        if self._connection is not None:
            lasting.append(self._connection)
            self._connection = None

    monkeypatch.setattr(ControlConnection, "close", close_later)
    done = drop(written(tmp_path, config(shop, lake)), "--yes")
    for connection in lasting:
        connection.pgconn.finish()
    assert done.exit_code == 0, done.output
    assert len(lasting) == 2

"""A schema that shadows all of pg_catalog, first in everybody's path: nothing of it is called."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from psycopg import AsyncConnection
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

from ingestd import cli
from ingestd.postgres.connection.liveness import LivenessCheckedConnection
from ingestd.postgres.connection.pinned_settings import SETTINGS
from ingestd.postgres.connection.session import _pin, parameters_of
from tests.conftest import HOSTILE
from tests.harness.command_line import await_verified, run_command
from tests.harness.config import polling_config, wal_config
from tests.harness.hostile import add_hostile_schema, hostile_calls
from tests.integration.test_least_privilege import SCRIPT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0


@pytest.fixture
def shop(database: Database) -> Iterator[Database]:
    database.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'glad')",
        "CREATE DOMAIN short AS varchar(9)",
        "CREATE TABLE orders (id int PRIMARY KEY, m mood, s short[], n numeric(9, 2), o regclass,"
        " at timestamptz DEFAULT now())",
        "CREATE TABLE parted (a int, b text, PRIMARY KEY (a, b)) PARTITION BY RANGE (a)",
        "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (50)",
        "CREATE TABLE parted_2 PARTITION OF parted DEFAULT",
        "INSERT INTO orders SELECT i, 'sad', ARRAY['x', NULL], i, 'orders', now()"
        " FROM generate_series(1, 200) i",
        "INSERT INTO parted SELECT i, 'b' || i FROM generate_series(1, 200) i",
    )
    if os.environ.get(HOSTILE):  # `database` has the schema, and looks for calls itself
        yield database
        return
    add_hostile_schema(database, victim_of(database))
    others = len(hostile_calls(database.server))  # of tests before this one
    yield database
    assert not hostile_calls(database.server)[others:]
    database.execute(f"DROP OWNED BY {victim_of(database)}", f"DROP ROLE {victim_of(database)}")


def victim_of(database: Database) -> str:
    return f"h_{database.name}"


def dsn_of(database: Database) -> str:
    return make_conninfo(database.dsn, user=victim_of(database))


CHANGES = (
    "UPDATE orders SET m = 'glad', n = n + 1 WHERE id < 50",
    "DELETE FROM orders WHERE id > 150",
    "ALTER TABLE orders ADD more int DEFAULT 7",
    "INSERT INTO orders VALUES (1000, 'glad', NULL, 1, 'parted', now(), 8)",
    "UPDATE parted SET a = a + 1000 WHERE a > 190",
    "TRUNCATE parted_1",
    "ALTER TABLE parted DETACH PARTITION parted_1",
)


@pytest.mark.parametrize("kind", ["wal", "polling"])
def test_hostile_schema_a_daemon_and_its_commands(
    shop: Database, lake: Path, make_daemon: MakeDaemon, kind: str
) -> None:
    slot = f"ingestd_{shop.name}"
    extra = f'slot = "{slot}"\npublication = "{slot}"\ndiscover_interval = "200ms"'
    reference = '[sources.shop.table."public.orders"]\nreference = "snapshot_plus_cdc"\n'
    if kind == "wal":
        config = wal_config(lake=lake, dsn=dsn_of(shop), source_extra=extra, extra=reference)
    else:
        config = polling_config(lake=lake, dsn=dsn_of(shop), extra=reference)
    daemon = make_daemon(config)
    for command in ("check", "tables"):
        done = run_command(daemon.config_path, command)
        assert done.returncode == 0, done.stdout + done.stderr
    daemon.start_ready(LIMIT_S)
    shop.execute(*CHANGES)
    await_verified(daemon, LIMIT_S)


@pytest.mark.parametrize("is_set", [True, False], ids=["set", "not set"])
async def test_hostile_schema_a_session_whose_options_did_not_arrive(
    shop: Database, *, is_set: bool
) -> None:
    """As through a pooler: what pins the settings is itself parsed on the server's path."""
    parameters = {**parameters_of(dsn_of(shop)), "options": "", "autocommit": True}
    async with await LivenessCheckedConnection.connect(**parameters) as connection:
        assert "hostile" in str(await (await connection.execute("SHOW search_path")).fetchone())
        connection.watch(parameters)
        names = await _pin(connection, SETTINGS, "", "claim", only_ours=not is_set)
        assert bool(names) is is_set
        async with await AsyncConnection.connect(**parameters) as other:
            assert await connection.is_waiting_by(other)


@pytest.mark.parametrize("kind", ["wal", "polling"])
def test_hostile_schema_what_a_superuser_runs(
    shop: Database, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = f"r_{shop.name}"
    variables = {"role": role, "publication": role, "slot": role, "kind": kind}
    told = {"tables": "public.orders, public.parted", **variables}
    done = subprocess.run(
        [
            *(str(shop.server.program("psql")), "-X", "-q", "-d", dsn_of(shop)),
            *(f"-v{name}={value}" for name, value in told.items()),
            *("-f", str(SCRIPT)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(cli.app, ["init", "--yes", "--dsn", dsn_of(shop)])
    shop.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")
    assert done.returncode == 0, done.stderr
    assert made.exit_code == 0, made.output

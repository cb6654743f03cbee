"""No value of a row is in any output, whatever its type and whatever goes wrong with its row.

A canary of every type that the server has is in a column, and in a key where the type can be one.
"""

from __future__ import annotations

import http.client
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from ingestd.http.client import request_snapshot
from ingestd.http.page_files import PAGE_PATHS
from ingestd.model.schema import TableId
from tests.harness.canaries import WORD, CanaryType, make_canaries, told_forms
from tests.harness.command_line import run_command
from tests.harness.compare import epochs, raw_rows, registry
from tests.harness.config import polling_config, wal_config
from tests.harness.databases import fresh_database
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("reader")
LIMIT_S = 120.0
EVERY, LATE = TableId("public", "every"), TableId("public", "late")
TOO_LARGE = f"repeat('{WORD}', 5400000)"
"""70 MB, with limits.memory at its least."""


@dataclass(frozen=True)
class Aviary:
    """A database with a table of all types, and one with a key of each."""

    database: Database
    types: list[CanaryType]
    keyed: dict[str, CanaryType]

    def insert(self, note: str) -> None:
        """Put a row into each table."""
        values = sql.SQL(", ").join(t.value for t in self.types if t.value is not None)
        row = sql.SQL("INSERT INTO public.every SELECT {}, {}, {}")
        with self.database.connect() as connection:
            connection.execute(row.format(f"{WORD} {note}", note, values))

    @property
    def tables(self) -> list[TableId]:
        return [EVERY, *(TableId("public", name) for name in self.keyed)]


@pytest.fixture
def aviary(own_postgres: PostgresServer) -> Iterator[Aviary]:
    with fresh_database(own_postgres) as database:
        types = make_canaries(database)
        keyed = {f"k_{t.column}": t for t in types if t.is_ordered or t.kind in "rmec"}
        columns = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(t.column), t.identifier) for t in types
        )
        with database.connect() as connection:
            create = "CREATE TABLE public.every (id text PRIMARY KEY, note text, {})"
            connection.execute(sql.SQL(create).format(columns))
            for name, kind in keyed.items():
                create = "CREATE TABLE public.{} (k {} PRIMARY KEY, note text)"
                insert = "INSERT INTO public.{} VALUES ({}, {})"
                table, value = sql.Identifier(name), kind.value
                connection.execute(sql.SQL(create).format(table, kind.identifier))
                connection.execute(sql.SQL(insert).format(table, value, f"{WORD} first"))
        made = Aviary(database, types, keyed)
        made.insert("first")
        database.execute(
            "CREATE TABLE late (id text PRIMARY KEY, n int, colour plumage, body text,"
            " seen timestamptz NOT NULL DEFAULT '7316-04-09 17:31:49.264973+00')",
            f"INSERT INTO late VALUES ('{WORD}', 1, '{WORD}', 'x')",
            "CREATE TABLE large (id text PRIMARY KEY, body text)",
        )
        yield made


def config_of(aviary: Aviary, lake: Path, kind: str) -> str:
    """Masks and types that the values don't fit, for some of the columns."""
    names = [t.column for t in aviary.types]
    texts = [
        n for n in names if n in {"c_text", "c_varchar", "c_bpchar", "c_name", "c_public_song"}
    ]
    types = ", ".join(f'{name} = "integer"' for name in texts[1:])
    masks = ", ".join(f'{name} = "sha256"' for name in names[::9] if name not in texts)
    extra = f"""
[limits]
memory = "64MB"
[sources.shop.table."public.every"]
types = {{ {types} }}
mask_columns = {{ {masks} }}
"""
    if kind == "wal":
        extra += '[sources.shop.table."public.late"]\nreference = "snapshot_plus_cdc"\n'
        return wal_config(
            lake=lake,
            dsn=aviary.database.dsn,
            source_extra=f'mask_key = "{"k" * 32}"\ndiscover_interval = "200ms"',
            extra=extra,
        )
    extra += '[sources.shop.table."public.late"]\ncursor = "seen"\ndetect_deletes = "200ms"\n'
    return polling_config(
        lake=lake, dsn=aviary.database.dsn, source_extra=f'mask_key = "{"k" * 32}"', extra=extra
    )


def assert_untold(text: str, where: str) -> None:
    found = told_forms(text)
    assert not found, f"{where}:\n" + "\n".join(found)


def listen_for_events(daemon: Daemon, limit_s: float = 2.0) -> str:
    """What the page receives at first, and for a moment after."""
    told = b""
    connection = http.client.HTTPConnection(daemon.listen.host, daemon.listen.port, timeout=limit_s)
    try:
        connection.request("GET", "/status/events")
        response = connection.getresponse()
        while chunk := response.read1():
            told += chunk
    except TimeoutError:
        pass
    finally:
        connection.close()
    return told.decode()


def assert_answers_untold(daemon: Daemon) -> None:
    for path in ("/status", "/metrics", "/readyz", "/healthz", "/nowhere", *sorted(PAGE_PATHS)):
        _, text = await_until(partial(daemon.get, path), LIMIT_S)
        assert_untold(text, path)
    told = listen_for_events(daemon)
    assert "event: state" in told
    assert_untold(told, "/status/events")
    for arguments in (["status"], ["status", "--json"], ["check", "--debug"], ["epochs", "shop"]):
        done = run_command(daemon.config_path, *arguments)
        assert_untold(done.stdout + done.stderr, " ".join(arguments))


def in_lake(lake: Path, table: TableId, note: str) -> bool:
    return any(row.get("note") == note for row in raw_rows(lake, table))


def is_live_again(daemon: Daemon, table: TableId) -> bool:
    told = [e["state"] for e in daemon.events("table.state") if e["table"] == str(table)]
    return "snapshotting" in told[1:] and told[-1] == "live"


def conditions(aviary: Aviary) -> Iterator[str]:
    """Conditions that fail at a value: each column as a number, and as a name of each kind."""
    for kind in aviary.types:
        yield f"(\"{kind.column}\"::text || 'x')::numeric > 0"
    for name in ("regclass", "regproc", "regtype", "regrole", "regnamespace", "plumage", "song"):
        schema = "public" if name in {"plumage", "song"} else "pg_catalog"
        yield f"(id || '.x.y')::{schema}.{name} IS NULL"
    for raised in ("P0001", "23514", "XX000", "42501", "55000", "57014"):
        yield f"public.raises(id, '{raised}')"


RAISES = """CREATE FUNCTION public.raises(told text, code text) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN RAISE '%', told USING errcode = code, detail = told, hint = told; END $$"""


def ask_for_rows(aviary: Aviary, daemon: Daemon) -> None:
    """Have snapshots fail at a value, one after the other."""
    asked = list(conditions(aviary))
    for i, condition in enumerate(asked[:: len(asked) // 6] + asked[-13:]):
        request_snapshot(daemon.listen, "shop", ["public.every"], condition)
        failed = partial(has_failed, daemon, i + 1)
        await_until(failed, LIMIT_S, daemon.tail)
    done = run_command(
        daemon.config_path, "snapshot", "shop", "public.every", "--debug", "--where",
        f"id::int > 0 AND note <> '{WORD}'",
    )  # fmt: skip
    assert done.returncode
    assert_untold(done.stdout.replace(WORD, ""), "ingestd snapshot")


def has_failed(daemon: Daemon, count: int) -> bool:
    return len(daemon.events("snapshot.failed")) >= count


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["wal", "polling"])
def test_no_canary_of_any_type_is_leaked(
    aviary: Aviary, lake: Path, make_daemon: MakeDaemon, kind: str
) -> None:
    database = aviary.database
    database.execute(RAISES)
    daemon = make_daemon(config_of(aviary, lake, kind))
    text = daemon.config_path.read_text()
    daemon.config_path.write_text(text.replace("[log]\n", '[log]\nlevel = "debug"\n'))
    daemon.start()
    await_until(lambda: in_lake(lake, EVERY, "first"), LIMIT_S, daemon.tail)
    # changes of every kind, of every key
    names = [f'public."{name}"' for name in aviary.keyed]
    aviary.insert("second")
    database.execute(
        *(f"UPDATE {name} SET note = 'second'" for name in names),
        *(f"DELETE FROM {name}" for name in names[::3]),
        f"UPDATE every SET id = '{WORD} third', note = 'third' WHERE note = 'first'",
        # what changes under it
        "ALTER TYPE plumage RENAME VALUE 'dull' TO 'kanarienvogels'",
        f"ALTER TYPE plumage ADD VALUE '{WORD} 2'",
        "ALTER TYPE bird ADD ATTRIBUTE age int",
        "ALTER TABLE late ALTER COLUMN n TYPE text",
        f"ALTER TABLE late ADD COLUMN added text DEFAULT '{WORD}'",
        f"INSERT INTO late VALUES ('{WORD} 2', 2, '{WORD} 2', '{WORD}')",
        "ALTER DOMAIN song ADD CHECK (public.raises(VALUE, '23514')) NOT VALID",
        # what stops tables
        *(f"ALTER TABLE {name} REPLICA IDENTITY NOTHING" for name in names[1::5]),
        f"INSERT INTO large VALUES ('{WORD}', {TOO_LARGE})",
    )
    await_until(lambda: in_lake(lake, EVERY, "third"), LIMIT_S, daemon.tail)
    await_until(
        lambda: any("MB" in e["reason"] for e in daemon.events("table.stopped")),
        LIMIT_S,
        daemon.tail,
    )
    if kind == "wal":
        for table in (EVERY, LATE):
            await_until(partial(is_live_again, daemon, table), LIMIT_S, daemon.tail)
        ask_for_rows(aviary, daemon)
    assert_answers_untold(daemon)
    daemon.sigkill()
    # at the usual level, and with a log of the lake that can't be read
    daemon.config_path.write_text(text)
    commits = sorted((lake / "shop/public/every/_delta_log").glob("*.json"))
    [*_, newest] = [c for c in commits if told_forms(c.read_text())]  # by its statistics
    kept = newest.read_text()
    newest.write_text(kept.replace('"dataChange"', '"dataChange')[: len(kept) - 2])
    daemon.start()
    await_until(
        lambda: any("every" in str(e) for e in daemon.events() if e["level"] == "error"),
        LIMIT_S,
        daemon.tail,
    )
    assert_answers_untold(daemon)
    daemon.sigterm()
    newest.write_text(kept)
    verified = run_command(
        daemon.config_path, "verify", "shop", "public.every", "--wait", "1s", "--debug"
    )
    assert_untold(verified.stderr, "verify's errors")
    assert_untold(daemon.log_path.read_text(), "the log")
    for row in (*registry(lake), *epochs(lake)):
        # the columns' texts and what is left to be read are of the lake
        assert_untold(
            str({k: v for k, v in row.items() if k not in {"columns", "resume"}}), "_tables"
        )

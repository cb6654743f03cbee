"""Names with bytes invalid in their database's encoding stop only what has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ingestd.app.check import check
from ingestd.model.schema import TableId
from tests.harness.command_line import run_command
from tests.harness.compare import raw_rows
from tests.harness.config import polling_config, wal_config
from tests.harness.waiting import await_until
from tests.integration.test_round_trip_encodings import recreate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
PARTED = TableId("public", "parted")
BYTES = {"WIN1252": "81", "SQL_ASCII": "ff", "EUC_JP": "a9a1", "UTF8": ""}
"""By encoding, bytes that the server can't convert, as hex; UTF8 has none."""
ODD = (
    "CREATE TABLE good (id int PRIMARY KEY, word text)",
    "CREATE TABLE copied (id int PRIMARY KEY)",
    "CREATE SCHEMA %1$I",
    "CREATE TABLE %1$I.held (id int PRIMARY KEY)",
    "CREATE TABLE public.%1$I (id int PRIMARY KEY)",
    "CREATE TABLE public.%2$I (id int PRIMARY KEY)",
    "CREATE TYPE %1$I.%2$I AS ENUM (%1$L, 'good')",
    "CREATE TABLE public.skipped_column (id int PRIMARY KEY, %1$I int, mood %1$I.%2$I)",
    "CREATE TABLE public.odd_column (id int PRIMARY KEY, %1$I int)",
    "COMMENT ON COLUMN good.word IS %1$L",
    "CREATE TABLE public.%3$I (id int PRIMARY KEY)",
    "INSERT INTO public.%3$I VALUES (1)",
    "CREATE TABLE public.skipped_twins (id int PRIMARY KEY, %1$I int, %3$I int)",
    "CREATE TABLE public.twins (id int PRIMARY KEY, %1$I int, %3$I int)",
    "CREATE TABLE public.later (id int PRIMARY KEY)",
    "ALTER TABLE good ADD mood %1$I.%2$I",
    "CREATE TABLE public.parted (id int PRIMARY KEY) PARTITION BY LIST (id)",
    "CREATE TABLE public.%1$I PARTITION OF public.parted DEFAULT",
)
"""Formats; the first value is an odd name, the second one of a table that nobody captures, the
third the text that the first is written as."""


def odd(database: Database, template: str, name: str, text: str = "") -> None:
    names = f"{name}, 'skipped_' || {name}, '{text}'"
    quoted = template.replace("'", "''")
    database.execute(f"DO $$ BEGIN EXECUTE format('{quoted}', {names}); END $$")


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    """Connect as a role whose name is no UTF-8, to the database of the test."""
    name = f"r_{database.name}_"
    value = f"convert_from('\\x{name.encode().hex()}ff', 'SQL_ASCII')"
    recreate(database, "SQL_ASCII")
    odd(database, "CREATE ROLE %1$I SUPERUSER", value)
    yield value
    recreate(database, "SQL_ASCII")
    odd(database, "DROP ROLE %1$I", value)


@pytest.mark.thorough
@pytest.mark.usefixtures("role")
@pytest.mark.parametrize(
    ("kind", "encoding"), [*(("wal", encoding) for encoding in BYTES), ("polling", "EUC_JP")]
)
def test_names_that_cant_be_converted(
    database: Database,
    lake: Path,
    make_daemon: MakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
    *,
    kind: str,
    encoding: str,
) -> None:
    """Names of uncaptured objects do not matter; a captured one has a remedy that renames it."""
    recreate(database, encoding)
    value = f"convert_from('\\x6e{BYTES[encoding]}', '{encoding}')"
    name = "n" + "".join(f"\\x{byte:02x}" for byte in bytes.fromhex(BYTES[encoding]))
    twin = name if BYTES[encoding] else f"{name}n"
    for template in ODD:
        odd(database, template, f"'p' || {value}" if "PARTITION OF" in template else value, twin)
    database.execute("INSERT INTO good VALUES (1, 'a', 'good')", "INSERT INTO parted VALUES (1)")
    config = configured(database, lake, kind)
    daemon = make_daemon(config)
    daemon.write_config(config)
    monkeypatch.chdir(daemon.folder)
    lines = check(daemon.config_path)
    daemon.start()

    def tables() -> dict[str, dict[str, Any]]:
        sources = (daemon.status() or {"sources": {}})["sources"].values()
        return {table["table"]: table for source in sources for table in source["tables"]}

    def are(state: str, *names: str) -> bool:
        found = tables()
        return all(name in found and found[name]["state"] == state for name in names)

    refused = ["public.twins", "public.odd_column"] if BYTES[encoding] else []
    refused += [f"{name}.held", f"public.{name} (2)"] if refused else []
    live = "public.good", "public.parted", "public.later", f"public.{twin}"
    await_until(
        lambda: are("live", *live) and are("stopped", *refused),
        LIMIT_S,
        lambda: f"the others to be read: {tables()}\n{lines}",
    )
    failed = {line.subject for line in lines if line.level == "fail"}
    assert failed == {f"table {table}" for table in refused}
    odd(database, "INSERT INTO public.%2$I VALUES (2)", value)
    database.execute(
        "INSERT INTO good VALUES (2, 'b', 'good')",
        "INSERT INTO parted VALUES (2)",
        "INSERT INTO skipped_column VALUES (1)",
        "INSERT INTO skipped_twins VALUES (1, 2, 3)",
        "INSERT INTO twins VALUES (1, 2, 3)",
    )
    odd(database, "INSERT INTO public.%3$I VALUES (2)", value, twin)
    odd(database, "ALTER TABLE later ADD %1$I int, ADD %3$I int", value, twin)
    refused += ["public.later"] if refused else []
    database.execute("INSERT INTO later VALUES (2, 3, 4)", "INSERT INTO good VALUES (3, 'c', NULL)")

    def arrived(captured: str) -> bool:
        return {1, 2} <= {row["id"] for row in raw_rows(lake, TableId("public", captured))}

    await_until(lambda: all(map(arrived, ("good", "parted", twin))), LIMIT_S, daemon.tail)
    await_until(lambda: are("stopped", *refused), LIMIT_S, "the table with an odd column to stop")
    if kind == "wal":
        odd(database, "TRUNCATE public.%1$I", f"'p' || {value}", twin)
        await_until(
            lambda: [row["_cdc_seq"] for row in raw_rows(lake, PARTED)].count(-1) == 2,
            LIMIT_S,
            daemon.tail,
        )
        status = daemon.status()
        assert status is not None
        assert [r["state"] for r in status["sources"]["shop"]["references"]] == ["live"]
    assert_verified(daemon, refused)
    database.execute(*[tables()[table]["remedy"] for table in refused])
    await_until(
        lambda: all(table["state"] in {"live", "dropped"} for table in tables().values()),
        LIMIT_S,
        lambda: f"the renamed to be captured: {tables()}",
    )
    assert_verified(daemon, [])


def configured(database: Database, lake: Path, kind: str) -> str:
    patterns = ("*.*", "!public.skipped*")
    if kind == "polling":
        return polling_config(lake=lake, dsn=database.dsn, tables=patterns)
    database.execute(
        f'CREATE PUBLICATION "{database.name}" FOR ALL TABLES'
        " WITH (publish_via_partition_root = true)"
    )
    extra = f'slot = "{database.name}"\npublication = "{database.name}"'
    extra += '\ndiscover_interval = "500ms"'
    extra += '\n[sources.shop.table."public.copied"]\nreference = "snapshot_only"'
    extra += '\nrefresh = "1h"'
    return wal_config(lake=lake, dsn=database.dsn, tables=patterns, source_extra=extra)


def assert_verified(daemon: Daemon, refused: list[str]) -> None:
    """`verify` compares all but what can't be named, and reports that."""
    found = run_command(daemon.config_path, "verify", "shop", columns=300)
    assert found.returncode == bool(refused), found.stdout + found.stderr
    assert found.stdout.count(": equal") >= 3
    for table in refused:
        assert f"{table}: not compared" in found.stdout

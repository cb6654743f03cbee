"""A publication change that the server refuses for one table stops that table alone (I8, I13)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.app.check import check
from ingestd.model.schema import TableId
from ingestd.postgres.connection.session import connect
from ingestd.postgres.wal.publication.alteration import why_refused
from tests.harness.config import wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
BARRED = {f"public.barred_{code.lower()}": code for code in ("P0001", "42501", "22023", "25006")}
"""Tables that an event trigger keeps out of publications, as extensions of providers do."""
GUARD = """
CREATE FUNCTION guard() RETURNS event_trigger LANGUAGE plpgsql AS $$
DECLARE named text;
BEGIN
  FOR named IN SELECT relname FROM pg_publication_rel JOIN pg_class c ON c.oid = prrelid LOOP
    IF named LIKE 'barred_%' THEN
      RAISE EXCEPTION 'kept out by policy' USING ERRCODE = upper(substring(named from 8));
    END IF;
  END LOOP;
END $$
"""


@pytest.mark.thorough
def test_a_table_that_the_server_keeps_out_stops_alone(
    database: Database, lake: Path, make_daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a start, and while streaming; the remedy publishes it."""
    first, *later = BARRED
    database.execute(
        GUARD,
        "CREATE EVENT TRIGGER guard ON ddl_command_end EXECUTE FUNCTION guard()",
        "CREATE TABLE good (id int PRIMARY KEY)",
        f"CREATE TABLE {first} (id int PRIMARY KEY)",
        "INSERT INTO good VALUES (1)",
    )
    extra = f'slot = "{database.name}"\npublication = "{database.name}"'
    extra += '\ndiscover_interval = "500ms"'
    config = wal_config(lake=lake, dsn=database.dsn, source_extra=extra)
    daemon = make_daemon(config)
    monkeypatch.chdir(daemon.folder)
    daemon.write_config(config)
    failed = [line for line in check(daemon.config_path) if line.level == "fail"]
    assert [line.subject for line in failed] == [f"table {first}"]
    daemon.start()

    def tables() -> dict[str, dict[str, Any]]:
        status = daemon.status() or {"sources": {}}
        return {
            table["table"]: table
            for source in status["sources"].values()
            for table in source["tables"]
        }

    def are(state: str, *names: str) -> bool:
        found = tables()
        return all(name in found and found[name]["state"] == state for name in names)

    await_until(
        lambda: are("live", "public.good") and are("stopped", first), LIMIT_S, "the first to stop"
    )
    for name in later:
        database.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY)", f"INSERT INTO {name} VALUES (1)"
        )
    database.execute("CREATE TABLE more (id int PRIMARY KEY)", "INSERT INTO more VALUES (1)")
    await_until(
        lambda: are("live", "public.good", "public.more") and are("stopped", *BARRED),
        LIMIT_S,
        lambda: f"the others to go on: {tables()}",
    )
    found = [tables()[name] for name in BARRED]
    assert all("the server refuses to add it to publication" in t["reason"] for t in found)
    database.execute("DROP EVENT TRIGGER guard", *[table["remedy"] for table in found])
    await_until(lambda: are("live", *BARRED), LIMIT_S, lambda: f"them to be taken: {tables()}")


async def test_tables_are_tried_while_another_session_alters(
    database: Database,
) -> None:
    database.execute("CREATE TABLE good (id int PRIMARY KEY)", "CREATE PUBLICATION held")
    with database.connect(autocommit=False) as other:
        other.execute("ALTER PUBLICATION held SET (publish = 'insert')")
        async with asyncio.timeout(LIMIT_S), await connect(database.dsn) as connection:
            assert await why_refused(connection, "held", [TableId("public", "good")]) == {}

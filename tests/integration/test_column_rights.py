"""A role that may read the captured columns only: not seeing the others is the point of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from psycopg.conninfo import make_conninfo

from ingestd.lake.layout import Layout
from ingestd.model.schema import TableId
from tests.harness.command_line import run_command
from tests.harness.compare import raw_rows, registry
from tests.harness.config import polling_config, wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 90.0
PEOPLE, PARTS = TableId("public", "people"), TableId("public", "parts")
SECTIONS = """
[sources.shop.table."public.people"]
exclude_columns = ["secret"]
[sources.shop.table."public.parts"]
exclude_columns = ["secret"]
"""


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    name = f"i_{database.name}"
    database.execute(
        "CREATE TABLE people (id int PRIMARY KEY, name text, secret text)",
        "INSERT INTO people SELECT i, 'n' || i, 's' FROM generate_series(1, 5000) i",
        "CREATE TABLE parts (id int PRIMARY KEY, name text, secret text) PARTITION BY RANGE (id)",
        "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (100) TO (1000)",
        "INSERT INTO parts SELECT i, 'n' || i, 's' FROM generate_series(1, 200) i",
        f"CREATE ROLE {name} LOGIN REPLICATION",
        f"CREATE PUBLICATION {database.name} FOR TABLE people, parts"
        " WITH (publish_via_partition_root = true)",
    )
    yield name
    database.execute(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


@pytest.mark.parametrize(
    "kind", ["wal", pytest.param("wal in chunks", marks=pytest.mark.thorough), "polling"]
)
def test_reading_the_captured_columns_suffices(
    database: Database, role: str, make_daemon: MakeDaemon, lake: Path, kind: str
) -> None:
    dsn = make_conninfo(database.dsn, user=role)
    names = [f'slot = "{database.name}"', f'publication = "{database.name}"', "manage = false"]
    if kind == "polling":
        made = polling_config(
            lake=lake,
            dsn=dsn,
            extra=SECTIONS.replace('["secret"]', '["secret"]\ndetect_deletes = "500ms"'),
        )
    else:
        above = ['snapshot_chunked_above = "0"'] if "chunks" in kind else []
        made = wal_config(
            lake=lake, dsn=dsn, source_extra="\n".join([*names, *above]), extra=SECTIONS
        )
        slot = f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')"
        database.execute(slot)
    daemon = make_daemon(made)
    # what is lacking is named without what is left out, and can be pasted
    said = run_command(daemon.config_path, "check", "--json")
    grants = [
        c["remedy"]
        for c in json.loads(said.stdout)["checks"]
        if c["subject"].startswith("table public")
    ]
    also = ', "xmin"' if kind == "polling" else ""
    assert [g for g in grants if g and g.startswith("GRANT")] == [
        f'GRANT SELECT ("id", "name"{also}) ON "public"."{table}" TO "{role}";'
        for table in ("parts", "people")
    ]
    database.execute(*[g for g in grants if g and g.startswith("GRANT")])
    said = run_command(daemon.config_path, "check")
    assert said.returncode == 0, said.stdout
    daemon.start_ready(LIMIT_S)
    database.execute(
        "UPDATE people SET name = 'new', secret = 'x' WHERE id = 1",
        "DELETE FROM people WHERE id = 2",
        "DELETE FROM parts WHERE id = 150",
    )

    def is_there() -> bool:
        deleted = [r["id"] for r in raw_rows(lake, PEOPLE) if r["_cdc_op"] == "d"]
        gone = [r["id"] for r in raw_rows(lake, PARTS) if r["_cdc_op"] == "d"]
        return deleted == [2] and gone == [150]

    await_until(is_there, LIMIT_S, daemon.tail)
    assert "secret" not in raw_rows(lake, PEOPLE)[0]
    assert {r["state"] for r in registry(lake)[-2:]} == {"live"}
    verified = run_command(daemon.config_path, "verify", "shop")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    daemon.close()


def test_reading_the_kept_columns_suffices_for_a_reference_table(
    database: Database, role: str, make_daemon: MakeDaemon, lake: Path
) -> None:
    sections = SECTIONS.replace("]\nex", ']\nreference = "snapshot_only"\nrefresh = "500ms"\nex')
    config = wal_config(
        lake=lake,
        dsn=make_conninfo(database.dsn, user=role),
        source_extra=f'slot = "{database.name}"\npublication = "{database.name}"\nmanage = false',
        extra=sections,
    )
    database.execute(
        "CREATE TABLE captured (id int PRIMARY KEY)",
        f"GRANT SELECT ON captured TO {role}",
        f"ALTER PUBLICATION {database.name} SET TABLE captured",
        f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')",
    )
    daemon = make_daemon(config)
    said = json.loads(run_command(daemon.config_path, "check", "--json").stdout)["checks"]
    grants = [c["remedy"] for c in said if c["subject"].startswith("reference table")]
    assert grants == [
        f'GRANT SELECT ("id", "name") ON "public"."{table}" TO "{role}";'
        for table in ("people", "parts")
    ]
    database.execute(*grants)
    daemon.start()

    def rows() -> int:
        try:
            found = DeltaTable(str(lake / Layout("shop").reference(PARTS))).to_pyarrow_table()
        except TableNotFoundError:
            return 0
        assert found.column_names == ["id", "name"]
        return int(found.num_rows)

    await_until(lambda: rows() == 200, LIMIT_S, daemon.tail)
    database.execute("DELETE FROM parts WHERE id = 150")
    await_until(lambda: rows() == 199, LIMIT_S, daemon.tail)

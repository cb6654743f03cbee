"""Values in a table's definition that the server can't output stop that table alone (I8)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import psycopg
import pytest

from ingestd.postgres.captured.catalog import read_catalog
from ingestd.postgres.catalog.table_faults import MOST_UNREADABLE
from ingestd.postgres.settings import WalSettings
from tests.harness.bystander import GOOD, config_for, ids_in
from tests.harness.waiting import await_until
from tests.integration.test_large_rows import await_state
from tests.integration.test_unsent_rows import deepest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("table owner")
BAD = ("CREATE TABLE bad (id int PRIMARY KEY)", "INSERT INTO bad VALUES (1)")


def settings_of(database: Database) -> WalSettings:
    keys = {"kind": "wal", "dsn": database.dsn, "slot": "s", "publication": "p"}
    return WalSettings.model_validate({**keys, "tables": ["public.*"]})


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        ("wal", "while it runs"),
        ("polling", "at a start"),
        pytest.param("wal", "at a start", marks=pytest.mark.thorough),
        pytest.param("polling", "while it runs", marks=pytest.mark.thorough),
    ],
)
def test_a_missing_value_without_text_stops_its_table(
    database: Database, lake: Path, make_daemon: MakeDaemon, kind: str, when: str
) -> None:
    database.execute(*GOOD, *BAD)
    daemon = make_daemon(config_for(kind, database, lake))
    if when == "while it runs":
        daemon.start_ready()
    deep = deepest(database)
    database.execute(f"ALTER TABLE bad ADD COLUMN v jsonpath DEFAULT {deep}")
    with pytest.raises(psycopg.errors.StatementTooComplex):
        database.value(
            "SELECT array_to_string(attmissingval, '') FROM pg_attribute WHERE atthasmissing"
        )
    if when == "at a start":
        daemon.start()
    database.execute("INSERT INTO good VALUES (2)", "INSERT INTO bad VALUES (2, '$')")
    await_until(lambda: 2 in ids_in(lake), 45, daemon.tail)
    stopped = await_state(daemon, lake, "bad", "stopped")
    assert "column 'v' was added with a default whose value can't be read" in stopped["reason"]
    assert not daemon.events("source.failed"), daemon.events("source.failed")[:2]


@pytest.mark.parametrize("bad", [1, MOST_UNREADABLE + 2])
@pytest.mark.parametrize("partitioned", [False, True])
async def test_other_missing_values_are_read(
    database: Database, bad: int, *, partitioned: bool
) -> None:
    """Those of other tables, and of the same one unless it has too many that fail."""
    parted = " PARTITION BY LIST (id)" if partitioned else ""
    database.execute(
        "CREATE TABLE good (id int PRIMARY KEY)",
        f"CREATE TABLE bad (id int PRIMARY KEY){parted}",
        *(["CREATE TABLE bad_1 PARTITION OF bad DEFAULT"] if partitioned else []),
        "INSERT INTO good VALUES (1)",
        "INSERT INTO bad VALUES (1)",
        "ALTER TABLE good ADD COLUMN v text DEFAULT 'kept'",
        "ALTER TABLE bad ADD COLUMN first text DEFAULT 'kept'",
        *(f"ALTER TABLE bad ADD v{n} jsonpath DEFAULT {deepest(database)}" for n in range(bad)),
        "ALTER TABLE bad ADD COLUMN last text DEFAULT 'kept'",
    )
    settings = settings_of(database)
    catalog = await read_catalog(settings)
    found = {row.name: {c.name: c for c in catalog.columns[row.oid]} for row in catalog.rows}
    assert found["good"]["v"].missing == "kept"
    assert found["bad"]["first"].missing == "kept"
    unread = {name for name, column in found["bad"].items() if column.unread}
    assert unread >= {f"v{n}" for n in range(bad)}
    assert ("last" in unread) == (bad > MOST_UNREADABLE)
    assert catalog == await read_catalog(settings)


async def test_a_row_filter_without_text_is_its_tables_fault(database: Database) -> None:
    """A constant in it is written by its type's output function."""
    [fields] = re.findall(r"\d+", deepest(database))
    condition = f"jsonb_path_exists(v, '${'.a' * int(fields)}')"
    database.execute(
        "CREATE TABLE good (id int PRIMARY KEY)",
        "CREATE TABLE bad (id int PRIMARY KEY, v jsonb)",
        "CREATE PUBLICATION p FOR TABLE good WHERE (id > 0)",
        f"ALTER PUBLICATION p ADD TABLE bad WHERE ({condition})",
    )
    catalog = await read_catalog(settings_of(database))
    found = {table.name: how for table, how in catalog.published.items()}
    assert found["good"].row_filter == "(id > 0)"
    fault = found["bad"].filter_fault
    assert fault is not None
    assert "nested too deeply" in fault.reason

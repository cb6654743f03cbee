"""Configured tables that do not exist are reported with a remedy, and read once they do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from ingestd.app.check import check
from ingestd.http.client import fetch_status
from ingestd.lake.delta.read import read_files
from ingestd.lake.layout import Layout
from ingestd.lake.store.store import open_store
from ingestd.model.schema import TableId
from tests.harness.command_line import run_command
from tests.harness.config import polling_config, wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
FOLLOWED, READ, MANUAL = ("snapshot_plus_cdc", "snapshot_only", "manual")
ABSENT = {
    "public.followed": (FOLLOWED, "does not exist"),
    "public.read": (READ, "does not exist"),
    "public.manual": (MANUAL, "does not exist"),
    "public.a*b": (FOLLOWED, "does not exist"),
    "nowhere.followed": (FOLLOWED, "does not exist"),
    "public.view": (FOLLOWED, "is a view"),
    "public.read_view": (READ, "is a view"),
    "public.matview": (MANUAL, "is a materialized view"),
    "public.part": (FOLLOWED, "is a partition of public.root"),
    "public.read_part": (READ, "is a partition of public.root"),
    "public.counter": (READ, "is a sequence"),
    "public.bare": (FOLLOWED, "has no columns"),
    "public.read_bare": (READ, "has no columns"),
    "public.hidden": (FOLLOWED, "leaves no column"),
    "public.outright": ("off", "does not exist"),
}
"""By table: how it is kept, and why it can't be."""
EXCLUDED = {"public.hidden": 'exclude_columns = ["secret"]'}
MADE = [
    "CREATE TABLE good (id int PRIMARY KEY)",
    "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)",
    "CREATE TABLE part PARTITION OF root FOR VALUES FROM (0) TO (9)",
    "CREATE TABLE read_part PARTITION OF root FOR VALUES FROM (9) TO (99)",
    "CREATE VIEW view AS SELECT * FROM good",
    "CREATE VIEW read_view AS SELECT * FROM good",
    "CREATE MATERIALIZED VIEW matview AS SELECT * FROM good",
    "CREATE SEQUENCE counter",
    "CREATE TABLE bare ()",
    "CREATE TABLE read_bare ()",
    "CREATE TABLE hidden (secret text)",
    "INSERT INTO good VALUES (1)",
]
CLEARED = [
    "DROP VIEW view, read_view",
    "DROP MATERIALIZED VIEW matview",
    "DROP SEQUENCE counter",
    "DROP TABLE root, bare, read_bare, hidden",
    "CREATE SCHEMA nowhere",
]


def rows_of(lake: Path, folder: str) -> list[dict[str, Any]]:
    try:
        handle = DeltaTable(str(lake / folder))
    except TableNotFoundError:
        return []
    rows: list[dict[str, Any]] = read_files(handle, open_store(str(lake), None), folder).to_pylist()
    return rows


def sections() -> str:
    kept = [
        f'[sources.shop.table."{name}"]\nreference = "{how}"\n{EXCLUDED.get(name, "")}'
        for name, (how, _) in ABSENT.items()
        if how != "off"
    ]
    return "\n".join([*kept, '[sources.shop.table."public.masked"]\nexclude_columns = ["a"]'])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["wal", "polling"])
def test_isolated_absent_tables_are_reported_then_read_when_made(
    database: Database, lake: Path, make_daemon: MakeDaemon, kind: str
) -> None:
    database.execute(*MADE)
    tables = ("public.*", "public.outright", "nowhere.*", "elsewhere.*", "!public.typo")
    extra = ""
    if kind == "wal":
        names = f'slot = "{database.name}"\npublication = "{database.name}"'
        extra = f'discover_interval = "500ms"\n{names}'
    make = wal_config if kind == "wal" else polling_config
    daemon = make_daemon(
        make(lake=lake, dsn=database.dsn, tables=tables, source_extra=extra, extra=sections())
    )
    checked = {
        line.subject.removeprefix("reference "): line
        for line in check(daemon.config_path)
        if line.level == "fail"
    }
    daemon.start()

    def facts() -> dict[str, Any]:
        return ((fetch_status(daemon.listen) or {}).get("sources") or {}).get("shop") or {}

    def stopped() -> dict[str, Any]:
        shown = [*facts().get("references", ()), *facts().get("tables", ())]
        return {one["table"]: one for one in shown if one["state"] == "stopped"}

    await_until(lambda: ABSENT.keys() <= stopped().keys(), LIMIT_S, daemon.tail)
    readiness = daemon.get("/readyz")
    assert readiness is not None
    status = run_command(daemon.config_path, "status").stdout
    logged = [*daemon.events("table.stopped"), *daemon.events("reference.stopped")]
    for name, shown in stopped().items():
        assert ABSENT[name][1] in shown["reason"], name
        assert shown["remedy"], name
        assert (readiness[0], f"{shown['reason']}; remedy: " in readiness[1]) == (503, True), name
        assert f"{name} is stopped: {shown['reason']}" in status, name
        assert shown["remedy"] in status, name
        assert (shown["reason"], shown["remedy"]) == (
            checked[f"table {name}"].detail,
            checked[f"table {name}"].remedy,
        )
        assert any((e["table"], e["reason"]) == (name, shown["reason"]) for e in logged), name
    assert checked.keys() == {f"table {name}" for name in stopped()}
    notices = {e["reason"] for e in daemon.events("tables.unmatched")}
    assert len(notices) == 4, notices
    for part in ("'nowhere.*'", "'elsewhere.*'", "'!public.typo'", "exclude_columns"):
        assert any(part in notice for notice in notices), part

    database.execute("INSERT INTO good VALUES (2)")
    raw = Layout("shop").raw(TableId("public", "good"))
    await_until(lambda: len(rows_of(lake, raw)) >= 2, LIMIT_S, daemon.tail)

    database.execute(*CLEARED)
    for name in ABSENT:
        table = TableId.parse(name)
        quoted = f'"{table.schema}"."{table.name}"'
        database.execute(
            f"CREATE TABLE {quoted} (id int PRIMARY KEY, secret text)",
            f"INSERT INTO {quoted} VALUES (1), (2)",
        )
    daemon.await_ready(LIMIT_S)
    assert stopped() == {}
    for name, (how, _) in ABSENT.items():
        if how != "off":
            folder = Layout("shop").reference(TableId.parse(name))
            assert sorted(row["id"] for row in rows_of(lake, folder)) == [1, 2], name
    assert daemon.events("source.failed") == []
    daemon.close()


def test_check_tries_to_read_reference_tables(
    database: Database, lake: Path, make_daemon: MakeDaemon, stranger: str
) -> None:
    """Row security and missing rights are each found before a run."""
    names = ("hiding", "denied", "good")
    database.execute(
        *(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in names),
        f"GRANT SELECT ON hiding, good TO {stranger}",
        "ALTER TABLE hiding ENABLE ROW LEVEL SECURITY",
    )
    sections = [f'[sources.shop.table."public.{n}"]\nreference = "manual"' for n in names]
    dsn = f"{database.dsn} user={stranger}"
    daemon = make_daemon(polling_config(lake=lake, dsn=dsn, extra="\n".join(sections)))
    found = {line.subject: line for line in check(daemon.config_path)}
    hiding, denied, good = (found[f"reference table public.{name}"] for name in names)
    assert (hiding.level, denied.level, good.level) == ("fail", "fail", "ok"), found
    assert "row-level security" in hiding.detail
    assert "BYPASSRLS" in str(hiding.remedy)
    assert "GRANT SELECT" in str(denied.remedy)

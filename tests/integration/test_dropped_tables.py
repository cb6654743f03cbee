"""Changes before a DROP TABLE are in the lake, whether the daemon ran or not (I2)."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from ingestd.model.schema import TableId
from tests.harness.compare import assert_lake_equals_source, raw_rows, registry
from tests.harness.config import wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
OTHER = TableId("public", "other")
OTHERS = "INSERT INTO other(at) VALUES ('{s}')"
CREATE = """CREATE TABLE {s}.t (id int PRIMARY KEY, note text, m {s}.mood, n {s}.small,
                                ms {s}.mood[], big text)"""
MAKE = (
    "CREATE SCHEMA {s}",
    "CREATE TYPE {s}.mood AS ENUM ('sad', 'glad')",
    "CREATE DOMAIN {s}.small AS int",
    CREATE,
    "INSERT INTO {s}.t VALUES (1, 'a', 'sad', 4, '{{sad,NULL}}')",
)
CHANGES = (
    "INSERT INTO {s}.t VALUES (2, 'b', 'glad', 5, '{{glad}}')",
    "UPDATE {s}.t SET note = 'c' WHERE id = 1",
    "DELETE FROM {s}.t WHERE id = 1",
)
"""Each in a transaction that changes another table too."""
MORE = "INSERT INTO {s}.t VALUES (5, 'e', 'sad', 5, '{{sad,glad}}', NULL, 7)"


@dataclass(frozen=True)
class Case:
    """Of a table in a schema called as the case. `after`: what is done after the changes.

    `later`: one more change before that, of a column that was added.
    """

    name: str
    after: tuple[str, ...]
    later: bool = False

    @property
    def table(self) -> TableId:
        return TableId(self.name, "t")

    @property
    def changes(self) -> list[str]:
        found = [f"BEGIN; {c}; {OTHERS}; COMMIT" for c in CHANGES]
        if self.later:
            found += ["ALTER TABLE {s}.t ADD later int", f"BEGIN; {MORE}; {OTHERS}; COMMIT"]
        return self.named(*found, *self.after)

    def named(self, *statements: str) -> list[str]:
        return [s.format(s=self.name) for s in statements]


CASES = (
    Case("dropped", ("DROP TABLE {s}.t",)),
    Case("with_its_types", ("DROP TABLE {s}.t", "DROP TYPE {s}.mood", "DROP DOMAIN {s}.small")),
    Case(
        "columns_with_their_types", ("DROP TYPE {s}.mood CASCADE", "DROP DOMAIN {s}.small CASCADE")
    ),
    Case("with_its_schema", ("DROP SCHEMA {s} CASCADE",)),
    Case(
        "created_again",
        ("DROP TABLE {s}.t", CREATE, "INSERT INTO {s}.t VALUES (9, 'new', 'sad', 1, '{{}}')"),
    ),
    Case(
        "created_otherwise",
        (
            "DROP TABLE {s}.t",
            "CREATE TABLE {s}.t (note int PRIMARY KEY, id text)",
            "INSERT INTO {s}.t VALUES (9, 'new')",
        ),
    ),
    Case(
        "created_without_key",
        ("DROP TABLE {s}.t", "CREATE TABLE {s}.t (note int)"),
    ),
    Case("altered_first", ("DROP TABLE {s}.t",), later=True),
    Case("renamed_first", ("ALTER TABLE {s}.t RENAME TO gone", "DROP TABLE {s}.gone")),
    Case("renamed", ("ALTER TABLE {s}.t RENAME TO there",)),
    Case("truncated_first", ("BEGIN; TRUNCATE {s}.t; DROP TABLE {s}.t; COMMIT",)),
)


def begin(database: Database, make_daemon: MakeDaemon, lake: Path, interval: str) -> Daemon:
    database.execute("CREATE TABLE other (id serial PRIMARY KEY, at text)")
    for case in CASES:
        database.execute(*case.named(*MAKE))
    names = f'slot = "{database.name}"\npublication = "{database.name}"\n'
    extra = f'{names}discover_interval = "{interval}"'
    made = make_daemon(wal_config(lake=lake, dsn=database.dsn, tables=["*.*"], source_extra=extra))
    made.start_ready()
    return made


def assert_whole(database: Database, daemon: Daemon, lake: Path) -> None:
    """What was changed by the same transactions is in both tables' logs, in the same epochs."""
    found = database.rows(
        "SELECT schemaname, tablename FROM pg_tables WHERE tableowner = 'postgres'"
    )
    schemas = {"public", *(case.name for case in CASES)}
    present = [TableId(s, n) for s, n in found if s in schemas]
    present.remove(TableId("created_without_key", "t"))
    await_until(
        lambda: states(lake).items() >= {str(name): "live" for name in present}.items(),
        LIMIT_S,
        daemon.tail,
    )
    assert_lake_equals_source(database, lake, tables=present, slot=database.name)
    others = raw_rows(lake, OTHER)
    for case in CASES:
        of_case = {r["_cdc_xid"]: r["_cdc_epoch"] for r in others if r["at"] == case.name}
        assert_case(lake, case, of_case, is_present=case.table in present)
    assert daemon.events("source.failed") == []


def states(lake: Path) -> dict[str, str]:
    return {row["table"]: row["state"] for row in sorted(registry(lake), key=lambda r: r["at"])}


def assert_case(lake: Path, case: Case, others: dict[int, int], *, is_present: bool) -> None:
    rows = [r for r in raw_rows(lake, case.table) if r["_cdc_op"] in "cud"]
    old = sorted(rows, key=lambda r: (r["_cdc_lsn"], r["_cdc_seq"]))[: len(others)]
    assert {r["_cdc_xid"]: r["_cdc_epoch"] for r in old} == others, case
    assert Counter(r["_cdc_op"] for r in old[:3]) == {"c": 1, "u": 1, "d": 1}
    assert (old[0]["note"], old[0]["m"], old[0]["n"], old[0]["ms"]) == ("b", "glad", 5, ["glad"])
    events = sorted(
        (r for r in registry(lake) if r["table"] == str(case.table)), key=lambda r: r["at"]
    )
    if case.name == "created_without_key":
        assert events[-1]["state"] == "stopped"
    elif not is_present:
        assert events[-1]["state"] == "dropped"
        assert events[-1]["at_lsn"] > old[-1]["_cdc_lsn"]
    elif case.name != "columns_with_their_types":
        markers = [r["_cdc_lsn"] for r in raw_rows(lake, case.table) if r["_cdc_op"] == "t"]
        assert max(markers) > old[-1]["_cdc_lsn"]
    if case.later:
        assert old[-1]["later"] == 7
        assert "later" in {c["name"] for c in [e for e in events if e["columns"]][-1]["columns"]}


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_i2_changes_before_a_drop_while_no_daemon_runs(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    daemon = begin(database, make_daemon, lake, "1s")
    assert daemon.sigterm() == 0
    for case in CASES:
        database.execute(*case.changes)
    daemon.start()
    assert_whole(database, daemon, lake)


@pytest.mark.thorough
@pytest.mark.timeout(180)
@pytest.mark.parametrize("interval", ["200ms", "60s"])
def test_i2_changes_before_a_drop_and_a_kill(
    database: Database, make_daemon: MakeDaemon, lake: Path, interval: str
) -> None:
    daemon = begin(database, make_daemon, lake, interval)
    for case in CASES:
        database.execute(*case.changes)
    daemon.sigkill()
    daemon.start()
    assert_whole(database, daemon, lake)


_SOON = """
import datetime
from ingestd.observe import status
status.DROPPED_SHOWN_FOR = datetime.timedelta(seconds=1)
from ingestd.cli import main
main()
"""


@pytest.mark.attack("table owner")
def test_dropped_tables_leave_metrics_and_status(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """A role that may create matching tables can't make the status grow; `_tables` has them."""
    slot = f"ingestd_{database.name}"
    names = f'slot = "{slot}"\npublication = "{slot}"\ndiscover_interval = "200ms"'
    tables = ["public.*", "public.named"]
    config = wal_config(lake=lake, dsn=database.dsn, tables=tables, source_extra=names)
    made = [f"t{n}" for n in range(5)] + ["named"]
    database.execute("CREATE TABLE kept (id int PRIMARY KEY)")
    database.execute(*(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in made))
    daemon = make_daemon(config)
    daemon.program = (sys.executable, "-c", _SOON)
    daemon.start_ready()

    def shown(path: str) -> list[str]:
        code, text = daemon.get(path) or (0, "")
        assert code in {0, 200, 503}, text
        return [name for name in made if f"public.{name}" in text]

    database.execute(*(f"INSERT INTO {name} VALUES (1)" for name in made))
    await_until(lambda: shown("/metrics") == made, LIMIT_S, "the tables to be shown")
    database.execute(*(f"DROP TABLE {name}" for name in made))

    def recorded() -> set[str]:
        return {row["table"] for row in registry(lake) if row["state"] == "dropped"}

    gone = {f"public.{name}" for name in made}
    await_until(lambda: recorded() == gone, LIMIT_S, daemon.tail)
    await_until(lambda: not shown("/metrics") and not shown("/status"), LIMIT_S, daemon.tail)
    daemon.sigkill()
    daemon.start_ready()
    await_until(lambda: not shown("/metrics") and not shown("/status"), LIMIT_S, daemon.tail)
    assert recorded() == gone
    answer = daemon.get("/metrics")
    assert answer is not None
    assert 'table="public.kept"' in answer[1]
    assert daemon.sigterm() == 0

"""Damage of a raw table whose first load is under way stops it alone (I6, I8)."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from ingestd.failpoints import VARIABLE
from ingestd.model.schema import TableId
from tests.faults.test_lake_faults import config, slot_of
from tests.harness.command_line import run_command
from tests.harness.compare import assert_lake_equals_source, raw_rows, registry
from tests.harness.damages import ANYHOW, EVER, Damage, cut_files, move_away, remove_files
from tests.harness.lake_faults import IMPATIENT, bound_by_permissions, close_folder
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 120.0
ROWS = 3_000
FILES: dict[str, Damage] = {"files_removed": remove_files, "files_cut": cut_files}
KINDS: dict[str, Damage] = {
    **{kind: damage for kind, damage in EVER.items() if kind != "restored"},
    **FILES,
    "removed": shutil.rmtree,
    "untouched": lambda _: None,
}
UNREAD = ANYHOW
"""What who appends need not see; nobody can read such a table."""


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("when", ["down", "loading"])
def test_isolated_damage_in_a_first_load_stops_its_table_only(
    database: Database, make_daemon: MakeDaemon, lake: Path, when: str
) -> None:
    tables = {kind: TableId("public", kind) for kind in KINDS}
    for kind in KINDS:
        database.execute(
            f"CREATE TABLE {kind} (id serial PRIMARY KEY, note text)",
            f"INSERT INTO {kind} (note) SELECT repeat(md5(i::text), 10)"
            f" FROM generate_series(1, {ROWS}) i",
        )
    text = config(database, lake).replace(
        'discover_interval = "500ms"',
        'discover_interval = "500ms"\nsnapshot_chunk = "100kB"\nsnapshot_chunked_above = "0"',
    )
    daemon = make_daemon(text, environment={VARIABLE: "capture.split.after=delay:0.2@1+"})
    daemon.program = bound_by_permissions(IMPATIENT)
    daemon.start()
    await_until(
        lambda: all(raw_rows(lake, table) for table in tables.values()), LIMIT_S, daemon.tail
    )
    states = {row["table"]: row["state"] for row in registry(lake)}
    assert set(states.values()) == {"snapshotting"}
    if when == "down":
        daemon.sigkill()
    for kind, damage in KINDS.items():
        damage(lake / "shop/public" / kind)
    _write(database)
    if when == "down":
        del daemon.environment[VARIABLE]
        daemon.start()
    stops = EVER.keys() - {"restored"} - (set() if when == "down" else UNREAD)

    def stopped() -> set[str]:
        return {e["table"].removeprefix("public.") for e in daemon.events("table.stopped")}

    def states_of(kinds: set[str]) -> set[str]:
        found = {row["table"]: row["state"] for row in registry(lake)}
        return {found[f"public.{kind}"] for kind in kinds}

    await_until(lambda: stops <= stopped(), LIMIT_S, lambda: f"{stops - stopped()}")
    going_on = KINDS.keys() - stops - UNREAD - FILES.keys() - {"removed"}
    await_until(lambda: states_of(going_on | FILES.keys()) == {"live"}, LIMIT_S, daemon.tail)
    assert states_of(set(stops)) == {"stopped"}
    assert_lake_equals_source(
        database, lake, tables=[tables[k] for k in going_on], slot=slot_of(database)
    )
    assert daemon.events("source.failed") == []
    _assert_read_errors_name_the_file(daemon, lake)
    for event in daemon.events("table.stopped"):
        kind = event["table"].removeprefix("public.")
        assert event["remedy"].count("ingestd snapshot") == 1
        assert str(lake / "shop/public" / kind) in event["remedy"]
    _follow_remedies(daemon, lake, stopped() | UNREAD | FILES.keys())
    daemon.await_ready(LIMIT_S)
    _write(database)
    assert_lake_equals_source(
        database, lake, tables=list(tables.values()), slot=slot_of(database), limit_s=LIMIT_S
    )
    assert daemon.events("source.failed") == []
    assert daemon.sigterm() == 0


def _assert_read_errors_name_the_file(daemon: Daemon, lake: Path) -> None:
    """Of tables without a data file; another is compared."""
    names = [f"public.{kind}" for kind in [*FILES, "untouched"]]
    done = run_command(daemon.config_path, "verify", "shop", *names, "--json")
    assert done.returncode == 1, done.stderr
    found = {t["table"]: t for t in json.loads(done.stdout)["tables"]}
    assert found["public.untouched"]["state"] == "equal"
    for kind in FILES:
        folder = str(lake / "shop/public" / kind)
        fault = found[f"public.{kind}"]["fault"]
        assert f"{folder}/part-" in fault["what"]
        away = f"repair {folder}, or move that folder away: mv {folder} "
        assert fault["remedy"].startswith(away)
        assert fault["remedy"].endswith(f" && ingestd snapshot shop public.{kind}")
        peek = run_command(daemon.config_path, "peek", "shop", f"public.{kind}", "--limit", "9999")
        assert peek.returncode == 1, peek.stdout[:500]
        assert f"{folder}/part-" in "".join(peek.stderr.split())
        assert f"public.{kind}" in peek.stderr


def _follow_remedies(daemon: Daemon, lake: Path, kinds: set[str]) -> None:
    for kind in kinds:
        folder = lake / "shop/public" / kind
        if kind in {"no_permission", "read_only"}:
            folder.chmod(0o755)
            close_folder(folder, yes=False)
        else:
            move_away(folder)
    done = run_command(daemon.config_path, "snapshot", "shop", *(f"public.{k}" for k in kinds))
    assert done.returncode == 0, done.stdout + done.stderr


def _write(database: Database) -> None:
    database.execute(*(f"INSERT INTO {k} (note) VALUES (md5(random()::text))" for k in KINDS))

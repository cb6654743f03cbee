"""Any damage of a reference table stops it alone, and its remedy lets it continue (I8).

One table for each kind of damage and way to keep it, all damaged together.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from ingestd.http.client import fetch_status
from ingestd.lake.delta.read import read_files
from ingestd.lake.layout import Layout
from ingestd.lake.store.store import open_store
from ingestd.model.errors import IngestdError
from ingestd.model.schema import TableId
from tests.faults.test_lake_faults import config, slot_of
from tests.harness.command_line import run_command
from tests.harness.compare import assert_lake_equals_source
from tests.harness.damages import AT_START, EVER, NEVER, Damage, cut_files, move_away, remove_files
from tests.harness.lake_faults import IMPATIENT, bound_by_permissions, close_folder
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 120.0
OTHER = TableId("public", "other")
WHENS = ["start", pytest.param("idle", marks=pytest.mark.long)]
WAYS = {
    "followed": 'reference = "snapshot_plus_cdc"',
    "read": 'reference = "snapshot_only"\nrefresh = "500ms"',
}
FILES: dict[str, Damage] = {"file_removed": remove_files, "file_cut": cut_files}
KINDS = EVER | AT_START | NEVER | FILES | {"removed": shutil.rmtree}
STOPS = EVER.keys() - {"garbage", "garbage_before"}
"""What stops one, whenever it is done. A newest commit that is not whole is set aside."""
AT_OPENING = STOPS | {"garbage_before", "commit_removed", "wrong_pointer", *FILES}
"""What does so when it is opened; while the daemon runs nothing need be read of it."""


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("when", WHENS)
def test_isolated_any_damage_of_a_reference_table_stops_it_alone(
    database: Database, make_daemon: MakeDaemon, lake: Path, when: str
) -> None:
    kinds = {f"{way}_{kind}": kind for way in WAYS for kind in KINDS}
    names = list(kinds)
    database.execute(
        *(f"CREATE TABLE {n} (id serial PRIMARY KEY, note text)" for n in [*names, OTHER.name])
    )
    sections = [f'[sources.shop.table."public.{n}"]\n{WAYS[n.partition("_")[0]]}' for n in names]
    daemon = make_daemon(config(database, lake, "\n".join(sections)))
    daemon.program = bound_by_permissions(IMPATIENT)
    _write(database, names)
    daemon.start_ready(LIMIT_S)
    for _ in range(2):
        _write(database, names)
        _await_equal(database, lake, names)
    if when == "start":
        assert daemon.sigterm() == 0
    for name, kind in kinds.items():
        KINDS[kind](_folder(lake, name))
    _write(database, names)
    if when == "start":
        daemon.start()
    expected = {n for n in names if kinds[n] in (AT_OPENING if when == "start" else STOPS)}

    def stopped() -> set[str]:
        return {name for name, shown in _shown(daemon).items() if shown["state"] == "stopped"}

    await_until(lambda: expected <= stopped(), LIMIT_S, lambda: f"{expected - stopped()}")
    may_stop = AT_OPENING | AT_START.keys() | {"garbage"}
    going_on = [n for n in names if kinds[n] not in may_stop]
    _write(database, names)
    _await_equal(database, lake, going_on)
    await_until(lambda: not stopped() & set(going_on), LIMIT_S, lambda: f"{stopped()}")
    database.execute(f"INSERT INTO {OTHER.name} (note) VALUES ('goes on')")
    assert_lake_equals_source(
        database, lake, tables=[OTHER], slot=slot_of(database), limit_s=LIMIT_S
    )
    readiness = daemon.get("/readyz")
    assert readiness is not None
    assert readiness[0] == 503
    if when == "idle":
        assert daemon.sigterm() == 0
        offline = run_command(daemon.config_path, "status", "--json")
        assert offline.returncode == 0, offline.stderr
        daemon.start()
        # A full refresh has replaced all files meanwhile.
        whole = {f"read_{kind}" for kind in FILES}
        also = {n for n in names if kinds[n] in AT_OPENING} - whole
        await_until(lambda: also <= stopped(), LIMIT_S, lambda: f"{also - stopped()}")
    for name, shown in _shown(daemon).items():
        if shown["state"] == "stopped":
            _follow_remedy(_folder(lake, name), shown["reason"], shown["remedy"])
    _await_equal(database, lake, names)
    await_until(lambda: not stopped(), LIMIT_S, lambda: f"{stopped()}")
    _write(database, names)
    _await_equal(database, lake, names)
    assert daemon.events("source.failed") == []
    assert daemon.events("table.stopped") == []
    assert daemon.sigterm() == 0


def _follow_remedy(folder: Path, reason: str, remedy: str) -> None:
    assert str(folder) in reason
    assert f"repair {folder}, or move that folder away" in remedy
    if folder.name.endswith(("no_permission", "read_only")):
        folder.chmod(0o755)
        close_folder(folder, yes=False)
    elif folder.is_dir():
        command = remedy.partition("move that folder away: ")[2].partition("; ingestd re-creates")[
            0
        ]
        subprocess.run(["/bin/sh", "-c", command], check=True)  # as it would be pasted
        assert not folder.exists()
    else:
        move_away(folder)


def _shown(daemon: Daemon) -> dict[str, Any]:
    status = fetch_status(daemon.listen)
    if status is None:
        return {}
    return {r["table"].removeprefix("public."): r for r in status["sources"]["shop"]["references"]}


def _folder(lake: Path, name: str) -> Path:
    return lake / Layout("shop").reference(TableId("public", name))


def _await_equal(database: Database, lake: Path, names: list[str]) -> None:
    left = list(names)

    def are_equal() -> bool:
        while left and _rows(lake, left[0]) == sorted(
            database.rows(f"SELECT id, note FROM {left[0]}")
        ):
            del left[0]
        return not left

    await_until(are_equal, LIMIT_S, lambda: f"{left}")


def _rows(lake: Path, name: str) -> list[tuple[Any, ...]] | None:
    folder = Layout("shop").reference(TableId("public", name))
    try:
        handle = DeltaTable(_folder(lake, name))
        found = read_files(handle, open_store(str(lake), None), folder).to_pylist()
    except (DeltaError, IngestdError, OSError):
        return None
    return sorted((row.get("id"), row.get("note")) for row in found if row.get("id") is not None)


def _write(database: Database, names: list[str]) -> None:
    database.execute(*(f"INSERT INTO {n} (note) VALUES (md5(random()::text))" for n in names))

"""Whatever is done to a raw table stops it alone, and the remedy has it go on (I8).

One table for each kind of damage, all damaged together: the others show that they go on.
"""

from __future__ import annotations

import json
import shlex
import shutil
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from ingestd.recorded import TableState
from ingestd.schema import TableId
from tests.faults.test_lake_faults import config, newest, slot_of
from tests.harness.command_line import run_command
from tests.harness.compare import assert_lake_equals_source, registry
from tests.harness.lake_faults import IMPATIENT, bound_by_permissions, close_folder
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ingestd.demo.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

    Damage = Callable[[Path], object]

LIMIT_S = 90.0
WHENS = [
    "start",
    pytest.param("idle", marks=pytest.mark.long),
    pytest.param("kill", marks=pytest.mark.long),
]


def _commits(folder: Path) -> list[Path]:
    return sorted((folder / "_delta_log").glob("*.json"))


def _commit(folder: Path, *actions: dict[str, Any]) -> None:
    at = DeltaTable(folder).version() + 1
    lines = [json.dumps(action) for action in actions]
    (folder / "_delta_log" / f"{at:020}.json").write_text("\n".join(lines))


def _protocol(folder: Path, reader: int, writer: int, *features: str) -> None:
    told: dict[str, Any] = {"minReaderVersion": reader, "minWriterVersion": writer}
    if features:
        told |= {"readerFeatures": list(features), "writerFeatures": list(features)}
    _commit(folder, {"protocol": told})


def _append(folder: Path) -> None:
    schema = pa.schema(DeltaTable(folder).schema().to_arrow())
    nulls = pa.table([pa.nulls(1, f.type) for f in schema], schema=schema)
    write_deltalake(folder, nulls, mode="append")


def _overwrite(folder: Path) -> None:
    other = pa.table({"something": ["else"]})
    write_deltalake(folder, other, mode="overwrite", schema_mode="overwrite")


def _no_permission(folder: Path) -> None:
    close_folder(folder)
    folder.chmod(0)


def _file_in_place(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


EVER: dict[str, Damage] = {
    "garbage": lambda f: newest(f).write_text("}{\n"),
    "garbage_before": lambda f: _commits(f)[1].write_text("}{\n"),
    "reader_version": lambda f: _protocol(f, 99, 99),
    "feature": lambda f: _protocol(f, 3, 7, "fancy"),
    "no_permission": _no_permission,
    "read_only": close_folder,
    "file_in_place": _file_in_place,
    "log_is_a_file": lambda f: _file_in_place(f / "_delta_log"),
    "foreign_append": _append,
    "foreign_overwrite": _overwrite,
    "foreign_delete": lambda f: DeltaTable(f).delete("true"),
    "restored": lambda f: DeltaTable(f).restore(1),
}
"""What stops a table, whenever it is done."""
AT_START: dict[str, Damage] = {
    "empty": lambda f: newest(f).write_bytes(b""),
    "nul": lambda f: newest(f).write_bytes(bytes(newest(f).stat().st_size)),
    "cut": lambda f: newest(f).write_bytes(newest(f).read_bytes()[:40]),
    "commit_removed": lambda f: _commits(f)[1].unlink(),
    "wrong_pointer": lambda f: (f / "_delta_log/_last_checkpoint").write_text(
        '{"version":77,"size":1}'
    ),
}
"""What does so when the log is read."""
NEVER: dict[str, Damage] = {
    "optimized": lambda f: DeltaTable(f).optimize.compact(),
    "pointer": lambda f: (f / "_delta_log/_last_checkpoint").write_text("{"),
    "vectors": lambda f: _protocol(f, 3, 7, "deletionVectors"),
    "untouched": lambda _: None,
}
"""What does not: the table goes on, or is read again, and is whole."""
ANYHOW = {"garbage", "garbage_before", "log_is_a_file", "reader_version"}
"""What the daemon need not see while it runs: it appends without reading the log."""


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("when", WHENS)
def test_isolated_any_damage_of_a_raw_table_stops_it_alone_until_its_remedy(
    database: Database, make_daemon: MakeDaemon, lake: Path, when: str
) -> None:
    stops = EVER if when == "idle" else EVER | AT_START
    kinds = stops | NEVER
    tables = {kind: TableId("public", kind) for kind in kinds}
    database.execute(*(f"CREATE TABLE {k} (id serial PRIMARY KEY, note text)" for k in kinds))
    daemon = make_daemon(config(database, lake))
    daemon.program = bound_by_permissions(IMPATIENT)
    _write(database, kinds)
    daemon.start_ready()
    for _ in range(2):
        _write(database, kinds)
        _assert_equal(database, lake, list(tables.values()))
    if when == "start":
        assert daemon.sigterm() == 0
    for kind, damage in kinds.items():
        damage(lake / "shop/public" / kind)
    _write(database, kinds)
    if when == "start":
        daemon.start()
    elif when == "kill":
        await_until(lambda: _told(daemon), LIMIT_S, daemon.tail)
        daemon.sigkill()
        _write(database, kinds)
        daemon.start()
    expected = set(stops) - (ANYHOW if when == "idle" else set())

    def stopped() -> set[str]:
        return {table.rpartition(".")[2] for table in _told(daemon)}

    await_until(lambda: expected <= stopped(), LIMIT_S, lambda: f"{expected - stopped()}")
    going_on = [tables[kind] for kind in kinds.keys() - stopped() - ANYHOW]
    _write(database, kinds)
    _assert_equal(database, lake, going_on)
    found = stopped()
    assert found <= expected | ANYHOW
    states = {row["table"]: row["state"] for row in registry(lake)}
    assert {k for k in kinds if states[str(tables[k])] == TableState.STOPPED} == found
    readiness = daemon.get("/readyz")
    assert readiness is not None
    assert readiness[0] == 503
    assert daemon.events("source.failed") == [], daemon.events("source.failed")
    if when == "idle":
        assert daemon.sigterm() == 0
        daemon.start()
        await_until(lambda: set(stops) <= stopped(), LIMIT_S, lambda: f"{set(stops) - stopped()}")
        found = stopped()
    _follow_remedies(daemon, lake, found)
    daemon.await_ready(LIMIT_S)
    _write(database, kinds)
    _assert_equal(database, lake, list(tables.values()))
    assert daemon.events("source.failed") == []
    assert daemon.sigterm() == 0


def _write(database: Database, kinds: dict[str, Damage]) -> None:
    database.execute(*(f"INSERT INTO {k} (note) VALUES (md5(random()::text))" for k in kinds))


def _assert_equal(database: Database, lake: Path, tables: list[TableId]) -> None:
    assert_lake_equals_source(
        database, lake, tables=tables, slot=slot_of(database), limit_s=LIMIT_S
    )


def _told(daemon: Daemon) -> dict[str, str]:
    return {e["table"]: e["remedy"] for e in daemon.events("table.stopped")}


def _move_away(folder: Path) -> None:
    if folder.is_dir():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


def _follow_remedies(daemon: Daemon, lake: Path, found: set[str]) -> None:
    asked = []
    for name, remedy in _told(daemon).items():
        folder = lake / "shop/public" / name.rpartition(".")[2]
        assert str(folder) in remedy
        if folder.name in {"no_permission", "read_only"}:
            folder.chmod(0o755)
            close_folder(folder, yes=False)
        else:
            _move_away(folder)
        program, command, source, table = shlex.split(remedy.rpartition("then: ")[2])
        assert (program, command, source) == ("ingestd", "snapshot", "shop")
        asked.append(table)
    assert {table.rpartition(".")[2] for table in asked} == found
    done = run_command(daemon.config_path, "snapshot", "shop", *asked)
    assert done.returncode == 0, done.stderr

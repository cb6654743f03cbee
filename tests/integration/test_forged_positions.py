"""A position that was forged in one table's folder stops that table alone, however high (I8)."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.lake.delta.commit import HOLDS
from ingestd.model.lsn import LAST
from ingestd.model.schema import TableId
from ingestd.testing.oracle.comparison import compare_source
from tests.harness.command_line import run_command, snapshot_of
from tests.harness.compare import epochs
from tests.harness.config import polling_config, wal_config
from tests.harness.damages import newest
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("lake writer")

LIMIT_S = 40.0
JUST_ABOVE = 1 << 24
"""More than what a server writes during the test, and than positions of polling run ahead."""

ForgedCommit = dict[str, Any]


def app_transaction(version: int) -> Callable[[int, int], ForgedCommit]:
    """A commit without rows, up to this position, or that far above the last epoch's end."""
    return lambda end, _epoch: {"version": end + JUST_ABOVE if version == JUST_ABOVE else version}


def row_of_next_epoch(rows: int, lsn: int) -> Callable[[int, int], ForgedCommit]:
    """A commit with a file of the next epoch, of which the statistics say that."""

    def commit(end: int, epoch: int) -> ForgedCommit:
        return {"version": end, "rows": rows, "_cdc_lsn": lsn or end, "_cdc_epoch": epoch + 1}

    return commit


KINDS = {
    "just_above": app_transaction(JUST_ABOVE),
    "far": app_transaction(1 << 60),
    "last": app_transaction(LAST),
    "far_row": row_of_next_epoch(1, 1 << 60),
    "last_row": row_of_next_epoch(1, LAST),
    "many_rows": row_of_next_epoch(1 << 62, 0),
}
TABLES = {kind: TableId("public", kind) for kind in (*KINDS, "other")}


def forge(folder: Path, forged: ForgedCommit) -> None:
    """Put a commit that resembles a daemon's after the newest one, which must have a file."""
    last = newest(folder)
    actions = [json.loads(line) for line in last.read_text().splitlines()]
    by_kind = {kind: action[kind] for action in actions for kind in action}
    by_kind["txn"]["version"] = forged.pop("version")
    rows = forged.pop("rows", None)
    if rows is None:
        by_kind.pop("add")
    else:
        add = by_kind["add"]
        path = f"part-{0:032}.parquet"
        shutil.copy(folder / add["path"], folder / path)
        stats = json.loads(add["stats"]) | {"numRecords": rows}
        for bound in ("minValues", "maxValues"):
            stats[bound] |= forged
        by_kind["add"] = add | {"path": path, "stats": json.dumps(stats)}
    by_kind["commitInfo"][HOLDS] = str(len(by_kind) - 1)
    commit = last.with_name(f"{int(last.stem) + 1:020}.json")
    commit.write_text("".join(f"{json.dumps({k: a})}\n" for k, a in by_kind.items()))


@pytest.mark.parametrize(
    "config", [wal_config, pytest.param(polling_config, marks=pytest.mark.thorough)]
)
def test_a_forged_position_stops_its_table_alone(
    database: Database, lake: Path, make_daemon: MakeDaemon, config: Callable[..., str]
) -> None:
    for name in TABLES:
        database.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v int)")

    def write(value: int) -> None:
        database.execute(
            *(f"INSERT INTO {name} VALUES ({value}, {value})" for name in TABLES),
            *(f"UPDATE {name} SET v = {value}" for name in TABLES),
        )

    def await_equal(names: set[str]) -> None:
        expected = {TABLES[name] for name in names}

        def is_equal() -> bool:
            with database.connect() as connection:
                found = compare_source(connection, str(lake), "shop", list(expected))
            return len(found) == len(expected) and all(c.is_equal for c in found)

        await_until(is_equal, LIMIT_S, "the lake to equal the source")

    daemon = make_daemon(config(lake=lake, dsn=database.dsn))
    daemon.start_ready()
    write(1)
    await_equal(set(TABLES))
    write(2)
    await_equal(set(TABLES))
    assert daemon.sigterm() == 0
    last = epochs(lake)[-1]
    for kind, commit in KINDS.items():
        forge(lake / "shop/public" / kind, commit(last["end_lsn"], last["epoch"]))
    write(3)
    daemon.start()
    await_equal({"other"})
    stopped = {e["table"]: e["remedy"] for e in daemon.events("table.stopped")}
    assert set(stopped) == {str(TABLES[kind]) for kind in KINDS}
    assert daemon.events("source.failed") == []
    for kind in KINDS:
        refused = run_command(daemon.config_path, "snapshot", "shop", f"public.{kind}")
        assert refused.returncode != 0, kind
        shutil.rmtree(lake / "shop/public" / kind)
        assert snapshot_of(stopped[str(TABLES[kind])]) == ["snapshot", "shop", f"public.{kind}"]
    done = run_command(daemon.config_path, "snapshot", "shop", *stopped)
    assert done.returncode == 0, done.stderr
    write(4)
    await_equal(set(TABLES))
    assert daemon.sigterm() == 0
    daemon.start_ready()
    write(5)
    await_equal(set(TABLES))
    assert daemon.events("source.failed") == []
    assert daemon.sigterm() == 0

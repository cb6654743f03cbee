"""A daemon that polls: what its lake has is what the source has."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.lake.fold.plain import fold
from ingestd.model.schema import TableId
from ingestd.postgres.polling.progress import PollProgress
from ingestd.testing.oracle.comparison import compare_source
from tests.harness.compare import assert_change_log_is_sound, await_listed, registry
from tests.harness.config import polling_config, wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

ITEM = TableId("public", "item")
LIMIT_S = 20.0


def await_equal(database: Database, lake: Path, *tables: TableId, limit_s: float = LIMIT_S) -> None:
    """Wait until the fold of the lake is the source; the writers rest."""
    wanted = tables or (ITEM,)

    def is_equal() -> bool:
        with database.connect() as connection:
            found = compare_source(connection, str(lake), "shop", wanted)
        return len(found) == len(wanted) and all(c.is_equal for c in found)

    await_until(is_equal, limit_s, f"the lake to equal {', '.join(map(str, wanted))}")
    await_listed(database, lake)
    assert_change_log_is_sound(database, lake)


def rows(lake: Path, table: TableId = ITEM) -> list[dict[str, Any]]:
    found = read_raw(str(lake), "shop", table).to_pylist()
    return sorted(found, key=lambda row: (row["_cdc_lsn"], row["_cdc_seq"]))


def ops(lake: Path, table: TableId = ITEM) -> list[tuple[str, int | None]]:
    return [(row["_cdc_op"], row["id"]) for row in rows(lake, table)]


def is_live(lake: Path, table: str = "public.item") -> bool:
    events = [r for r in registry(lake) if r["table"] == table]
    return bool(events) and events[-1]["state"] == "live"


@pytest.fixture
def items(database: Database) -> Database:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, note text, at timestamptz DEFAULT now())",
        "CREATE INDEX ON item (at)",
        "INSERT INTO item SELECT i, 'note ' || i FROM generate_series(1, 50) i",
    )
    return database


CURSOR = '[sources.shop.table."public.item"]\ncursor = "at"\n'


@pytest.mark.thorough
def test_inserts_updates_and_deletes(items: Database, lake: Path, make_daemon: MakeDaemon) -> None:
    extra = CURSOR + 'detect_deletes = "200ms"\n'
    daemon = make_daemon(polling_config(lake=lake, dsn=items.dsn, extra=extra))
    daemon.start_ready()
    await_until(lambda: is_live(lake), LIMIT_S, "the table to be live")
    await_equal(items, lake)
    assert {op for op, _ in ops(lake)} == {"t", "r"}

    items.execute("INSERT INTO item VALUES (100, 'new')")
    items.execute("UPDATE item SET note = 'changed', at = now() WHERE id = 7")
    await_equal(items, lake)
    items.execute("DELETE FROM item WHERE id IN (3, 4)")
    await_equal(items, lake)
    items.execute("UPDATE item SET note = 'back', at = now() - interval '1 year' WHERE id = 8")
    items.execute("INSERT INTO item VALUES (101, 'null cursor', NULL)")
    items.execute("INSERT INTO item VALUES (3, 'again')")
    await_equal(items, lake)
    changes = [(op, key) for op, key in ops(lake) if op not in {"t", "r"}]
    assert sorted(changes) == [
        ("c", 3), ("c", 100), ("c", 101), ("d", 3), ("d", 4), ("u", 7), ("u", 8),
    ]  # fmt: skip

    assert daemon.sigterm() == 0
    items.execute("DELETE FROM item WHERE id = 9")
    items.execute("UPDATE item SET note = 'while away', at = now() WHERE id = 10")
    items.execute("INSERT INTO item VALUES (102, 'while away')")
    daemon.start_ready()
    await_equal(items, lake)
    later = [(op, key) for op, key in ops(lake) if op not in {"t", "r"}][7:]
    assert sorted(later) == [("c", 102), ("d", 9), ("u", 10)]


@pytest.mark.thorough
def test_an_interrupted_or_missed_sweep_runs_at_the_start(
    items: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """However rare sweeps are, and however often a daemon is restarted."""
    extra = CURSOR + 'detect_deletes = "1d"\n'
    daemon = make_daemon(polling_config(lake=lake, dsn=items.dsn, extra=extra))
    daemon.start_ready()
    await_until(lambda: is_live(lake), LIMIT_S, "the table to be live")
    daemon.sigkill()
    items.execute("DELETE FROM item WHERE id = 9")
    daemon.start_ready()
    await_equal(items, lake)
    assert ops(lake)[-1] == ("d", 9)

    items.execute("UPDATE item SET note = 'after the sweep', at = now() WHERE id = 10")
    await_equal(items, lake)
    progress = PollProgress.parse(_resume(lake))
    assert progress is not None
    assert time.time() - 3600 < progress.swept_at <= time.time()


def _resume(lake: Path) -> str:
    """Read what the newest commit says of where polling stands."""
    newest = max((lake / "shop" / "public" / "item" / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for line in newest.read_text().splitlines()]
    return str(next(a["commitInfo"]["ingestdResume"] for a in actions if "commitInfo" in a))


def test_another_cursor_loses_nothing(items: Database, lake: Path, make_daemon: MakeDaemon) -> None:
    """Rows that only the new cursor would have shown, changed under the old one."""
    items.execute("ALTER TABLE item ADD made timestamptz NOT NULL DEFAULT '2020-01-01'")
    items.execute("CREATE INDEX ON item (made)")
    by_made = CURSOR.replace('"at"', '"made"')
    daemon = make_daemon(polling_config(lake=lake, dsn=items.dsn, extra=by_made))
    daemon.start_ready()
    await_until(lambda: is_live(lake), LIMIT_S, "the table to be live")
    await_equal(items, lake)
    items.execute("UPDATE item SET note = 'old', at = now(), made = '2019-01-01' WHERE id = 5")
    assert daemon.sigterm() == 0
    daemon.write_config(polling_config(lake=lake, dsn=items.dsn, extra=CURSOR))
    daemon.start_ready()
    await_equal(items, lake)


@pytest.mark.thorough
def test_another_column_for_deleted_rows_resnapshots_the_table(
    items: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    items.execute("ALTER TABLE item ADD is_gone boolean NOT NULL DEFAULT false")
    items.execute("UPDATE item SET is_gone = true WHERE id IN (1, 2)")
    daemon = make_daemon(polling_config(lake=lake, dsn=items.dsn))
    daemon.start_ready()
    await_until(lambda: is_live(lake), LIMIT_S, "the table to be live")
    await_equal(items, lake)
    assert daemon.sigterm() == 0
    extra = CURSOR + 'deleted = "is_gone"\n'
    daemon.write_config(polling_config(lake=lake, dsn=items.dsn, extra=extra))

    def current() -> set[int]:
        return {row["id"] for row in fold(read_raw(str(lake), "shop", ITEM), ["id"])}

    for _ in range(2):  # and only once
        daemon.start_ready()
        await_until(lambda: current() == set(range(3, 51)), LIMIT_S, "the marked rows to go")
        await_until(lambda: is_live(lake), LIMIT_S, "the table to be live")
        assert daemon.sigterm() == 0
    assert [op for op, _ in ops(lake)].count("t") == 2


def _is_updated(lake: Path, key: int) -> bool:
    return ("u", key) in ops(lake)


@pytest.mark.thorough
def test_another_kind_of_capture_resnapshots(
    items: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """Neither knows what the other has delivered, although the slot still exists."""
    slot = f'slot = "{items.name}"\npublication = "{items.name}"'
    by_slot = wal_config(lake=lake, dsn=items.dsn, source_extra=slot)
    by_polling = polling_config(lake=lake, dsn=items.dsn, extra=CURSOR)
    daemon = make_daemon(by_slot)
    for key, config in enumerate((by_slot, by_polling, by_slot, by_polling), start=1):
        daemon.write_config(config)
        daemon.start_ready()
        await_until(lambda: is_live(lake), LIMIT_S, "the table to be live")
        items.execute(f"UPDATE item SET note = 'seen', at = now() WHERE id = {key}")
        await_until(partial(_is_updated, lake, key), LIMIT_S, f"the change of {key} to be there")
        assert daemon.sigterm() == 0
        items.execute(f"DELETE FROM item WHERE id = {key}")
        items.execute("INSERT INTO item SELECT max(id) + 1, 'more' FROM item")
    daemon.start_ready()
    current = {row["id"] for row in fold(read_raw(str(lake), "shop", ITEM), ["id"])}
    assert not current & {1, 2, 3}

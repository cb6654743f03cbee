"""Backfills with threads as executors: hand-over to the daemon, and kills (docs/backfill.md).

With Spark: tests/spark/test_backfill.py.
"""

from __future__ import annotations

import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from ingestd.lake.delta.read import read_raw
from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.ports import Fragment
from ingestd.postgres.catalog.block_range import BlockRange
from spark_jobs.backfills.record import Plan
from spark_jobs.backfills.task import Failure
from tests.harness.backfill import Threads, backfill, killed_backfill
from tests.harness.compare import (
    assert_change_log_is_sound,
    assert_lake_equals_source,
    epochs,
    registry,
)
from tests.harness.config import wal_config
from tests.harness.toast_writers import ToastWriters, create_big
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ingestd.testing.embedded.daemon import Daemon
    from spark_jobs.backfills.record import Note
    from spark_jobs.backfills.task import BackfillReader, SplitOrder
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60
ROWS = 3_000
BIG = "public.big"
SMALL = (
    "CREATE TABLE small (id int PRIMARY KEY, note text)",
    "INSERT INTO small SELECT i, 'n' || i FROM generate_series(1, 50) i",
)


def config(database: Database, lake: Path, *extra: str, tables: tuple[str, ...] = ("*",)) -> str:
    return wal_config(
        lake=lake,
        dsn=database.dsn,
        tables=[f"public.{name}" for name in tables],
        source_extra="\n".join(
            [f'slot = "{database.name}"', f'publication = "{database.name}"', *extra]
        ),
    )


def states(lake: Path) -> dict[str, str]:
    return {row["table"]: row["state"] for row in registry(lake)}


def await_live(daemon: Daemon, lake: Path, *tables: str) -> None:
    await_until(lambda: all(states(lake).get(t) == "live" for t in tables), LIMIT_S, daemon.tail)


def positions_of_rows_read(lake: Path, *, epoch: int | None = None) -> set[int]:
    rows = read_raw(str(lake), "shop", TableId.parse(BIG))
    return {
        row["_cdc_lsn"]
        for row in rows.select(["_cdc_op", "_cdc_lsn", "_cdc_epoch"]).to_pylist()
        if row["_cdc_op"] == "r" and epoch in {None, row["_cdc_epoch"]}
    }


def leftovers(lake: Path) -> list[Path]:
    return [path for path in lake.rglob("*") if path.parent.name == "_backfill"]


def assert_daemon_goes_on(
    database: Database, lake: Path, daemon: Daemon, *tables: str, is_dense: bool = True
) -> None:
    daemon.start()
    await_live(daemon, lake, *tables)
    assert_lake_equals_source(database, lake, slot=database.name)
    assert_change_log_is_sound(database, lake, is_dense=is_dense)


def test_i6_fresh_source_under_writes(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    create_big(database, ROWS)
    database.execute(*SMALL)
    daemon = make_daemon(config(database, lake))
    with ToastWriters(database, ROWS) as writers:
        outcome = backfill(daemon.config_path, "shop", [BIG])
        [filled] = outcome.filled
        assert filled.is_live
        assert outcome.is_listed
        assert states(lake) == {BIG: "live"}
        [epoch] = epochs(lake)  # readers need not wait for the daemon
        assert epoch["first_lsn"] == epoch["end_lsn"] == filled.point
        assert [(t["table"], t["rows"]) for t in epoch["tables"]] == [(BIG, filled.rows + 1)]
        before = writers.transactions
        daemon.start()
        await_until(lambda: writers.transactions > before + 100, LIMIT_S)
    assert_daemon_goes_on(database, lake, daemon, BIG, "public.small")
    assert positions_of_rows_read(lake) == {filled.point}
    assert not leftovers(lake)


# Tried too: claimed, prepared, listed.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "state",
    [
        pytest.param("planned", marks=pytest.mark.thorough),
        "split:3",
        pytest.param("read", marks=pytest.mark.thorough),
        f"loaded {BIG}",
        pytest.param("positioned", marks=pytest.mark.thorough),
        pytest.param("handed over", marks=pytest.mark.thorough),
    ],
)
def test_i3_i6_a_killed_driver_resumes(
    database: Database, make_daemon: MakeDaemon, lake: Path, state: str
) -> None:
    create_big(database, ROWS)
    daemon = make_daemon(config(database, lake))
    with ToastWriters(database, ROWS):
        killed_backfill(daemon.config_path, "shop", state, BIG)
        runner = Threads()
        outcome = backfill(daemon.config_path, "shop", [BIG], runner=runner)
    assert not outcome.failed
    numbers = {order.number for order in runner.orders}
    is_read = state not in {"claimed", "prepared", "planned", "split:3"}
    assert bool(numbers) is not is_read
    if state == "split:3":
        assert min(numbers) == 3  # those before are not read again
        assert not outcome.filled[0].is_live
    else:
        assert states(lake)[BIG] == "live"
    assert_daemon_goes_on(database, lake, daemon, BIG)
    markers = read_raw(str(lake), "shop", TableId.parse(BIG))["_cdc_seq"].to_pylist().count(-1)
    assert markers == 1  # it never restarted
    assert not leftovers(lake)


@pytest.mark.thorough
def test_i6_a_killed_backfill_of_another_table_keeps_read_rows(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    create_big(database, ROWS)
    database.execute(*SMALL)
    daemon = make_daemon(config(database, lake))
    with ToastWriters(database, ROWS):
        killed_backfill(daemon.config_path, "shop", "split:3", BIG)
        killed_backfill(daemon.config_path, "shop", "prepared", "public.small")
        runner = Threads()
        outcome = backfill(daemon.config_path, "shop", [BIG], runner=runner)
    assert not outcome.failed
    assert min(order.number for order in runner.orders) == 3
    assert_daemon_goes_on(database, lake, daemon, BIG, "public.small")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "state",
    [
        "split:3",
        pytest.param(f"loaded {BIG}", marks=pytest.mark.thorough),
        pytest.param("listed", marks=pytest.mark.thorough),
    ],
)
def test_i3_i6_daemon_instead_of_a_killed_driver(
    database: Database, make_daemon: MakeDaemon, lake: Path, state: str
) -> None:
    """It reads the table itself; then a backfill has nothing to do."""
    create_big(database, ROWS)
    daemon = make_daemon(config(database, lake))
    with ToastWriters(database, ROWS):
        killed_backfill(daemon.config_path, "shop", state, BIG)
        daemon.start()
        await_live(daemon, lake, BIG)
    assert_daemon_goes_on(database, lake, daemon, BIG)
    daemon.sigterm()
    outcome = backfill(daemon.config_path, "shop", [BIG])
    assert outcome.present == (TableId.parse(BIG),)
    assert not leftovers(lake)
    assert_daemon_goes_on(database, lake, daemon, BIG)


def test_one_writer_refuses_while_a_daemon_works(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    database.execute(*SMALL)
    daemon = make_daemon(config(database, lake))
    daemon.start_ready()
    with pytest.raises(OperatorError, match="a daemon or another backfill is running on it"):
        backfill(daemon.config_path, "shop", ["public.small"])


@pytest.mark.parametrize("state", [None, "split:3"])
def test_i4_i6_new_table_on_a_lake_with_live_tables(
    database: Database, make_daemon: MakeDaemon, lake: Path, state: str | None
) -> None:
    """Its changes from before it was published are in the snapshot, and no cut shows it early."""
    database.execute(*SMALL)
    daemon = make_daemon(config(database, lake, tables=("small",)))
    daemon.start()
    await_live(daemon, lake, "public.small")
    daemon.sigkill()
    create_big(database, ROWS)
    daemon.write_config(config(database, lake))
    last = epochs(lake)[-1]["epoch"]
    with ToastWriters(database, ROWS):
        database.execute("UPDATE small SET note = 'while nobody looks'")
        if state is not None:
            killed_backfill(daemon.config_path, "shop", state, BIG)
        outcome = backfill(daemon.config_path, "shop", [BIG])
        assert not outcome.is_listed
        assert epochs(lake)[-1]["epoch"] == last
        assert states(lake)[BIG] == ("snapshotting" if state == "split:3" else "live")
        daemon.start()
        await_live(daemon, lake, BIG)
    assert_daemon_goes_on(database, lake, daemon, BIG, is_dense=False)
    [first] = [e for e in epochs(lake) if e["epoch"] == last + 1]
    loaded = positions_of_rows_read(lake, epoch=last + 1)
    assert len(loaded) == 1 + (state is not None)
    assert first["end_lsn"] >= max(loaded)
    assert BIG in {t["table"] for t in first["tables"]}


@pytest.mark.thorough
def test_i4_table_is_listed_though_nothing_else_changes(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    database.execute(*SMALL)
    daemon = make_daemon(config(database, lake, tables=("small",)))
    daemon.start()
    await_live(daemon, lake, "public.small")
    daemon.sigterm()
    create_big(database, ROWS)
    daemon.write_config(config(database, lake))
    last = epochs(lake)[-1]["epoch"]
    backfill(daemon.config_path, "shop", [BIG])
    daemon.start()
    await_until(lambda: epochs(lake)[-1]["epoch"] > last, LIMIT_S, daemon.tail)
    [entry] = epochs(lake)[-1]["tables"]
    assert (entry["table"], entry["rows"]) == (BIG, ROWS + 1)
    assert_daemon_goes_on(database, lake, daemon, BIG)


@pytest.mark.thorough
@pytest.mark.parametrize("state", [None, "split:3"])
def test_i6_live_table_again(
    database: Database, make_daemon: MakeDaemon, lake: Path, state: str | None
) -> None:
    """The old rows serve until the new ones are complete."""
    create_big(database, ROWS)
    daemon = make_daemon(config(database, lake))
    daemon.start()
    await_live(daemon, lake, BIG)
    with ToastWriters(database, ROWS):
        daemon.sigkill()
        if state is not None:
            _killed_again(daemon, state)
        backfill(daemon.config_path, "shop", [BIG], again=True)
        daemon.start()
        await_live(daemon, lake, BIG)
    assert_daemon_goes_on(database, lake, daemon, BIG)
    assert len(positions_of_rows_read(lake)) > 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    "states_reached",
    [
        ["split:3", f"loaded {BIG}"],
        pytest.param(["loaded {BIG}"], marks=pytest.mark.thorough),
    ],
)
def test_i6_old_rows_serve_until_the_new_ones_are_complete(
    database: Database, make_daemon: MakeDaemon, lake: Path, states_reached: list[str]
) -> None:
    """Rows deleted before the point are not voided by a `t` yet, but have their `d`."""
    create_big(database, ROWS)
    daemon = make_daemon(config(database, lake))
    daemon.start()
    await_live(daemon, lake, BIG)
    daemon.sigkill()
    database.execute("DELETE FROM big WHERE n % 5 = 0")
    for state in states_reached:
        _killed_again(daemon, state.format(BIG=BIG))
        database.execute("UPDATE big SET n = 0 WHERE n % 7 = 0")
    assert len(positions_of_rows_read(lake)) == 1 + len(states_reached)
    assert states(lake)[BIG] == "live"
    assert_daemon_goes_on(database, lake, daemon, BIG)


def _killed_again(daemon: Daemon, state: str) -> None:
    killed_backfill(daemon.config_path, "shop", state, BIG, "--again")


@pytest.mark.thorough
def test_i6_values_that_neither_snapshot_has_are_read_by_key(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    """Between the two snapshots rows move to blocks already read; no change reports them."""
    create_big(database, ROWS)
    daemon = make_daemon(config(database, lake))
    killed_backfill(daemon.config_path, "shop", "split:6", BIG)
    database.execute("DELETE FROM big WHERE n <= 400", "VACUUM big")
    moved = "toasted IS NOT NULL AND n > 2000 AND n <= 2300"
    database.execute(f"UPDATE big SET note = repeat('y', 300) WHERE {moved}")
    runner = Threads()
    backfill(daemon.config_path, "shop", [BIG], runner=runner)
    lowest = min(BlockRange.parse(order.split.where).start for order in runner.orders)
    found = database.value(f"SELECT count(*) FROM big WHERE {moved} AND ctid < '({lowest},0)'")
    assert found > 10
    assert_daemon_goes_on(database, lake, daemon, BIG)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("meanwhile", "told"),
    [
        ("VACUUM FULL big", "are in other files"),
        pytest.param(
            "TRUNCATE big; INSERT INTO big VALUES (1, 'a', 1, 't', 'n')",
            "are in other files",
            marks=pytest.mark.thorough,
        ),
        ("ALTER TABLE big ADD COLUMN more int DEFAULT 7", "settings have changed"),
        pytest.param(
            "ALTER TABLE big ALTER n TYPE bigint",
            "rewritten|changed",
            marks=pytest.mark.thorough,
        ),
        ("ALTER PUBLICATION {0} DROP TABLE big", "the publication lacked it"),
        ("SELECT pg_drop_replication_slot('{0}')", "the slot does not have the changes"),
    ],
)
def test_i6_restarts_where_read_rows_are_void(
    database: Database, make_daemon: MakeDaemon, lake: Path, meanwhile: str, told: str
) -> None:
    create_big(database, ROWS)
    daemon = make_daemon(config(database, lake))
    killed_backfill(daemon.config_path, "shop", "split:3", BIG)
    database.execute(*meanwhile.format(database.name).split("; "))
    lines: list[str] = []
    [filled] = backfill(daemon.config_path, "shop", [BIG], print_line=lines.append).filled
    assert filled.is_live
    assert any("starts over" in line and re.search(told, line) for line in lines), lines
    assert_daemon_goes_on(database, lake, daemon, BIG)
    assert positions_of_rows_read(lake) == {filled.point}
    raw = lake / "shop" / "public" / "big"
    assert {p.name for p in raw.glob("*.parquet")} == {
        Path(uri).name for uri in DeltaTable(raw).file_uris()
    }  # nothing is left of what was void


class Failing(Threads):
    """Splits of one table can't be read; the others are."""

    def __init__(self, table: str) -> None:
        super().__init__()
        self._table = TableId.parse(table)

    def run(self, reader: BackfillReader, orders: Sequence[SplitOrder]) -> list[Note | Failure]:
        outcomes = super().run(reader, orders)
        last = Failure("connection lost", None, None, "connection_lost")
        for number, order in enumerate(orders):
            if order.split.table.id == self._table and order.number == 2:
                [path] = Path(reader.lake, order.run_folder).glob("split-000002*")
                path.unlink()
                outcomes[number] = last
        return outcomes


def test_i3_a_failed_table_is_resumed_once_the_rest_is_live(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    create_big(database, ROWS)
    database.execute(*SMALL)
    daemon = make_daemon(config(database, lake))
    chosen = [BIG, "public.small"]
    outcome = backfill(daemon.config_path, "shop", chosen, runner=Failing(BIG))
    [error] = outcome.failed
    assert isinstance(error, TransientError)
    assert states(lake) == {BIG: "snapshotting", "public.small": "live"}
    assert not epochs(lake)
    database.execute("UPDATE small SET note = 'new'", "UPDATE big SET n = 0 WHERE n < 500")
    runner = Threads()
    outcome = backfill(daemon.config_path, "shop", chosen, runner=runner)
    assert [order.number for order in runner.orders] == [2]
    assert [str(name) for name in outcome.present] == ["public.small"]
    assert backfill(daemon.config_path, "shop", chosen).filled == ()  # the daemon's turn
    assert_daemon_goes_on(database, lake, daemon, *chosen)


class Meanwhile(Threads):
    """Something happens while splits are read."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self._happens = happens

    def run(self, reader: BackfillReader, orders: Sequence[SplitOrder]) -> list[Note | Failure]:
        self._happens()
        return super().run(reader, orders)


def test_one_writer_of_two_drivers(database: Database, make_daemon: MakeDaemon, lake: Path) -> None:
    database.execute(*SMALL)
    daemon = make_daemon(config(database, lake))

    def second() -> None:
        with pytest.raises(OperatorError, match="another backfill"):
            backfill(daemon.config_path, "shop", ["public.small"])

    backfill(daemon.config_path, "shop", ["public.small"], runner=Meanwhile(second))
    assert_daemon_goes_on(database, lake, daemon, "public.small")


def test_one_writer_commits_nothing_without_the_claim(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    database.execute(*SMALL)
    daemon = make_daemon(config(database, lake))

    def cut_off() -> None:
        database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"
            " AND objsubid = 1 AND database ="
            " (SELECT oid FROM pg_database WHERE datname = current_database())"
        )

    with pytest.raises(TransientError):
        backfill(daemon.config_path, "shop", ["public.small"], runner=Meanwhile(cut_off))
    assert not (lake / "shop" / "public" / "small" / "_delta_log").exists()
    assert_daemon_goes_on(database, lake, daemon, "public.small")


@pytest.mark.attack("lake writer")
def test_a_forged_plan_removes_nothing(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    database.execute(*SMALL)
    daemon = make_daemon(config(database, lake))
    victim = lake.parent / "victim.txt"
    victim.write_text("not the lake's")
    folder = lake / "shop/public/small/_backfill"
    (folder / "0001-x").mkdir(parents=True)
    marker = Fragment("../../../../victim.txt", 1, 1, "{}", 1)
    forged = Plan("0001-x", "d", "7/1", 0, None, None, Lsn(1), datetime.now(UTC), marker, ())
    (folder / "0001-x/plan.json").write_text(forged.to_text())
    with pytest.raises(OperatorError, match="no backfill wrote this") as refused:
        backfill(daemon.config_path, "shop", ["public.small"])
    assert victim.read_text() == "not the lake's"
    command = str(refused.value.remedy).partition(": ")[2]
    subprocess.run(["bash", "-ec", command], check=True)
    assert len(backfill(daemon.config_path, "shop", ["public.small"]).filled) == 1
    assert victim.exists()


@pytest.mark.parametrize(
    ("name", "told"),
    [("public.smal", "did you mean 'public.small'"), ("public.keyless", "replica identity")],
)
def test_names_what_can_not_be_backfilled(
    database: Database, make_daemon: MakeDaemon, lake: Path, name: str, told: str
) -> None:
    database.execute(*SMALL, "CREATE TABLE keyless (a int)")
    daemon = make_daemon(config(database, lake))
    with pytest.raises(OperatorError, match=told):
        backfill(daemon.config_path, "shop", [name])
    assert not database.slots()

"""A source whose lake is not the one it wrote to: it stops, reports it, and harms nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
from http import HTTPStatus
from typing import TYPE_CHECKING

import pytest

from ingestd.failpoints import VARIABLE
from ingestd.model.schema import TableId
from tests.harness.command_line import run_command
from tests.harness.compare import epochs, raw_rows
from tests.harness.config import polling_config, wal_config
from tests.harness.lake_faults import IMPATIENT
from tests.harness.shop_servers import assert_equal, slot, snapshots, stopped_for
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
FIRST_START = (
    "sink.marker.before",
    "sink.marker.after",
    "sink.adopt.before",
    "sink.adopt.after",
    "capture.publication.after",
    "capture.slot.after",
    "sink.raw_commit.after",
    "sink.epochs_commit.after",
    "capture.confirm.before",
)
"""In the order in which a first start reaches them."""


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text)",
        "INSERT INTO orders SELECT i, 'first ' || i FROM generate_series(1, 100) i",
    )
    return database


def config(shop: Database, lake: Path, extra: str = "") -> str:
    soon = 'discover_interval = "500ms"'
    return wal_config(lake=lake, dsn=shop.dsn, source_extra=f"{soon}\n{extra}")


def confirmed(shop: Database) -> str:
    return str(slot(shop, "confirmed_flush_lsn::text"))


def content(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder."""
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")) if folder.exists() else ():
        found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else None
    return found


def metric(daemon: Daemon, name: str) -> float:
    answer = daemon.get("/metrics")
    assert answer is not None
    lines = [line for line in answer[1].splitlines() if line.startswith(f"{name}{{")]
    return float(lines[0].rpartition(" ")[2])


def lake_id(lake: Path) -> str:
    found: str = json.loads((lake / "_ingestd.json").read_text())["lake"]
    return found


def removed(_shop: Database, lake: Path, _older: Path) -> None:
    shutil.rmtree(lake)


def not_mounted(_shop: Database, lake: Path, _older: Path) -> None:
    shutil.rmtree(lake)
    lake.mkdir()
    (lake / "lost+found").mkdir()


def without_the_source(_shop: Database, lake: Path, _older: Path) -> None:
    shutil.rmtree(lake / "shop")


def another_lake(_shop: Database, lake: Path, _older: Path) -> None:
    shutil.rmtree(lake)
    lake.mkdir()
    other = {"format": 1, "lake": "11111111-2222-3333-4444-555555555555"}
    (lake / "_ingestd.json").write_text(json.dumps(other))


def an_older_copy(_shop: Database, lake: Path, older: Path) -> None:
    shutil.rmtree(lake)
    shutil.copytree(older, lake)


def an_older_copy_without_id(_shop: Database, lake: Path, older: Path) -> None:
    shutil.rmtree(lake)
    shutil.copytree(older, lake)
    (lake / "_ingestd.json").unlink()


KINDS = {
    "removed": (removed, "has nothing of this source"),
    "not_mounted": (not_mounted, "has nothing of this source"),
    "without_the_source": (without_the_source, "has nothing of this source"),
    "another_lake": (another_lake, "has nothing of this source"),
    "older": (an_older_copy, "older copy"),
    "older_unmarked": (an_older_copy_without_id, "older copy"),
}


def assert_lost(daemon: Daemon, shop: Database, lake: Path, told: str, before: str) -> None:
    """It is stopped for that, everywhere it shows; nothing is written and nothing moved."""
    there = content(lake)
    failed = stopped_for(daemon)
    assert told in failed["reason"]
    assert "--accept-empty-lake shop" in failed["remedy"]
    assert 'lake_lost = "resnapshot"' in failed["remedy"]
    ready = daemon.get("/readyz")
    assert ready is not None
    assert ready[0] == HTTPStatus.SERVICE_UNAVAILABLE
    assert "the lake is lost" in ready[1]
    status = daemon.status()
    assert status is not None
    assert status["sources"]["shop"]["lake_lost"]
    assert failed["reason"] in str(status["sources"]["shop"]["last_errors"])
    assert metric(daemon, "ingestd_lake_lost") == 1
    retries = metric(daemon, "ingestd_restarts_total")
    await_until(
        lambda: metric(daemon, "ingestd_restarts_total") > retries, LIMIT_S, "another attempt"
    )
    assert content(lake) == there
    assert confirmed(shop) == before


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_lost_lake_stops_its_source_and_nothing_is_written(
    shop: Database, lake: Path, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """I1, I13: each kind of loss; a restored lake is continued automatically, without a gap."""
    daemon = make_daemon(config(shop, lake))
    daemon.program = IMPATIENT
    daemon.start_ready()
    assert_equal(shop, lake)
    older, away = tmp_path / "older", tmp_path / "away"
    shutil.copytree(lake, older)
    for number, (lose, told) in enumerate(KINDS.values(), 200):
        shop.execute(f"INSERT INTO orders VALUES ({number}, 'there')")
        assert_equal(shop, lake)
        assert daemon.sigterm() == 0
        before = confirmed(shop)
        shutil.copytree(lake, away)
        lose(shop, lake, older)
        shop.execute(f"UPDATE orders SET note = 'meanwhile' WHERE id = {number}")
        if lose in {removed, an_older_copy}:
            checked = run_command(daemon.config_path, "check", "--json")
            assert checked.returncode == 1, checked.stdout + checked.stderr
            (line,) = [n for n in json.loads(checked.stdout)["checks"] if told in n["detail"]]
            assert line["level"] == "fail"
            assert "--accept-empty-lake shop" in line["remedy"]
        if lose is removed:
            offline = run_command(daemon.config_path, "status", "--json")
            assert told in json.loads(offline.stdout)["sources"]["shop"]["reason"]
            paused = run_command(daemon.config_path, "pause", "shop")
            assert paused.returncode == 1, paused.stdout
            assert not lake.exists()
        daemon.start()
        assert_lost(daemon, shop, lake, told, before)
        shutil.rmtree(lake, ignore_errors=True)
        away.rename(lake)
        daemon.await_ready(LIMIT_S)
        assert_equal(shop, lake)
        assert metric(daemon, "ingestd_lake_lost") == 0
    assert snapshots(lake) == 1
    assert daemon.sigterm() == 0


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["option", "config"])
def test_a_lost_lake_is_begun_again_if_that_is_agreed_to(
    shop: Database, lake: Path, make_daemon: MakeDaemon, tmp_path: Path, how: str
) -> None:
    extra = 'lake_lost = "resnapshot"' if how == "config" else ""
    daemon = make_daemon(config(shop, lake, extra))
    arguments = () if how == "config" else ("--accept-empty-lake", "shop")
    daemon.start_ready()
    assert_equal(shop, lake)
    assert daemon.sigterm() == 0
    older = tmp_path / "older"
    shutil.copytree(lake, older)
    kinds = list(KINDS.values())[:: 1 if how == "option" else 4]
    for number, (lose, told) in enumerate(kinds, 200):
        daemon.start_ready()
        shop.execute(f"INSERT INTO orders VALUES ({number}, 'there')")
        assert_equal(shop, lake)
        assert daemon.sigterm() == 0
        lose(shop, lake, older)
        shop.execute(f"DELETE FROM orders WHERE id < {number - 190}")
        events = len(daemon.events("source.lake_lost"))
        daemon.start(*arguments)
        daemon.await_ready(LIMIT_S)
        assert_equal(shop, lake)
        new = daemon.events("source.lake_lost")[events:]
        assert [told in event["reason"] for event in new] == [True]
        assert (lake / "_ingestd.json").exists()
        assert daemon.sigterm() == 0
        daemon.start_ready()  # and from then on without being asked
        assert_equal(shop, lake)
        assert len(daemon.events("source.lake_lost")) == events + 1
        assert daemon.sigterm() == 0


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_lake_that_vanishes_under_a_daemon_is_not_replaced(
    shop: Database, lake: Path, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """Consent at the start does not cover a later loss."""
    daemon = make_daemon(config(shop, lake))
    daemon.program = IMPATIENT
    daemon.start("--accept-empty-lake", "shop")
    daemon.await_ready(LIMIT_S)
    assert_equal(shop, lake)
    away = tmp_path / "away"
    for has_changes in (False, True):
        before = lake_id(lake)
        lake.rename(away)
        if has_changes:
            shop.execute(
                "DELETE FROM orders WHERE id <= 10", "CREATE TABLE more (id int PRIMARY KEY)"
            )
        failed = stopped_for(daemon)
        assert "the lake is lost" in failed["reason"]
        assert metric(daemon, "ingestd_lake_lost") == 1
        assert not lake.exists()
        at = confirmed(shop)
        another_lake_there = {"format": 1, "lake": "11111111-2222-3333-4444-555555555555"}
        lake.mkdir()
        (lake / "_ingestd.json").write_text(json.dumps(another_lake_there))
        await_until(
            lambda: "another lake" in daemon.events("source.failed")[-1]["reason"],
            LIMIT_S,
            daemon.tail,
        )
        assert [path.name for path in lake.iterdir()] == ["_ingestd.json"]
        assert confirmed(shop) == at
        shutil.rmtree(lake)
        away.rename(lake)
        daemon.await_ready(LIMIT_S)
        assert_equal(shop, lake)
        assert lake_id(lake) == before
    assert snapshots(lake) == 1
    assert daemon.sigterm() == 0


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_copy_in_place_of_the_lake_is_not_written_to(
    shop: Database, lake: Path, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """I13: its marker is the same, and the next version would follow a gap."""
    daemon = make_daemon(config(shop, lake))
    daemon.program = IMPATIENT
    daemon.start_ready()
    shop.execute("CREATE TABLE other (id int PRIMARY KEY)", "INSERT INTO other VALUES (7)")
    other = TableId("public", "other")
    await_until(lambda: {7} <= {r["id"] for r in raw_rows(lake, other)}, LIMIT_S, daemon.tail)
    assert_equal(shop, lake)
    older, away = tmp_path / "older", tmp_path / "away"
    shutil.copytree(lake, older)
    logs = logs_of(lake)
    for number, has_changes in enumerate((True, False), 300):
        shop.execute(f"INSERT INTO orders VALUES ({number}, 'there')")
        assert_equal(shop, lake)
        lake.rename(away)
        shutil.copytree(older, lake)
        if has_changes:  # before it checks whether the lake exists
            shop.execute(f"UPDATE orders SET note = 'meanwhile' WHERE id = {number}")
        failed = stopped_for(daemon)
        assert "the lake is lost" in failed["reason"]
        assert "copy" in failed["reason"]  # as the commit says, or the attempt after it
        assert "--accept-empty-lake shop" in failed["remedy"]
        assert metric(daemon, "ingestd_lake_lost") == 1
        assert logs_of(lake) == logs
        shutil.rmtree(lake)
        away.rename(lake)
        daemon.await_ready(LIMIT_S)
        assert_equal(shop, lake)
    assert snapshots(lake) == 1
    assert daemon.sigterm() == 0


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_running", [True, False])
def test_an_older_copy_of_one_raw_table_stops_that_table(
    shop: Database, lake: Path, make_daemon: MakeDaemon, tmp_path: Path, *, is_running: bool
) -> None:
    """I8, I13: its missing rows have been confirmed."""
    shop.execute("CREATE TABLE other (id int PRIMARY KEY)", "INSERT INTO other VALUES (7)")
    daemon = make_daemon(config(shop, lake))
    daemon.start_ready()
    assert_equal(shop, lake)
    orders, other = lake / "shop/public/orders", TableId("public", "other")
    shutil.copytree(orders, tmp_path / "older")
    shop.execute("INSERT INTO orders VALUES (200, 'x')")
    assert_equal(shop, lake)
    if not is_running:
        assert daemon.sigterm() == 0
    shutil.rmtree(orders)
    shutil.copytree(tmp_path / "older", orders)
    shop.execute("INSERT INTO orders VALUES (201, 'x')", "INSERT INTO other VALUES (8)")
    told = "a copy took its place" if is_running else "it is an older copy"
    if not is_running:
        checked = run_command(daemon.config_path, "check", columns=1000)
        assert (checked.returncode, told in checked.stdout) == (1, True), checked.stdout
        assert "ingestd snapshot shop public.orders" in checked.stdout
        daemon.start()
    await_until(lambda: daemon.events("table.stopped"), LIMIT_S, daemon.tail)
    [stopped] = daemon.events("table.stopped")
    assert told in stopped["reason"]
    await_until(lambda: 8 in {r["id"] for r in raw_rows(lake, other)}, LIMIT_S, daemon.tail)
    orders.rename(tmp_path / "away")
    command = re.findall(r"ingestd (snapshot [\w. ]+)", stopped["remedy"])[-1]
    ran = run_command(daemon.config_path, *command.split())
    assert ran.returncode == 0, ran.stdout + ran.stderr
    daemon.await_ready(LIMIT_S)
    assert_equal(shop, lake)
    assert daemon.sigterm() == 0


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_polled_lake_stops_where_its_loss_can_be_detected(
    shop: Database, lake: Path, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """I13: the source keeps no trace. On an older copy it continues: the polls find the rest."""
    deletes = '[sources.shop.table."public.orders"]\ndetect_deletes = "500ms"'
    daemon = make_daemon(polling_config(lake=lake, dsn=shop.dsn, extra=deletes))
    daemon.program = IMPATIENT

    def assert_same() -> None:
        source = set(shop.rows("SELECT id, note FROM orders"))
        await_until(lambda: current(lake) == source, LIMIT_S, daemon.tail)

    def is_sound() -> None:
        assert_same()
        assert daemon.sigterm() == 0

    daemon.start_ready()
    is_sound()
    older = tmp_path / "older"
    shutil.copytree(lake, older)
    assert len(daemon.events("source.first_start")) == 1
    daemon.start_ready()
    shop.execute("DELETE FROM orders WHERE id < 5", "INSERT INTO orders VALUES (200, 'x')")
    is_sound()
    shop.execute("UPDATE orders SET note = 'y' WHERE id = 200", "DELETE FROM orders WHERE id = 7")
    shutil.rmtree(lake)
    shutil.copytree(older, lake)
    daemon.start_ready()
    is_sound()
    assert snapshots(lake) == 1
    for lose, told in (
        (without_the_source, "says that the source was read into it"),
        (with_a_note, "but has NOT_MOUNTED"),
    ):
        lose(shop, lake, older)
        there = content(lake)
        checked = run_command(daemon.config_path, "check", "--json")
        assert checked.returncode == 1, checked.stdout + checked.stderr
        lines = [n for n in json.loads(checked.stdout)["checks"] if n["level"] == "fail"]
        assert [told in line["detail"] for line in lines] == [True]
        daemon.start()
        failed = stopped_for(daemon)
        assert told in failed["reason"]
        assert metric(daemon, "ingestd_lake_lost") == 1
        assert daemon.sigterm() == 0
        assert content(lake) == there
        daemon.start(*re.findall(r"(--accept-empty-lake) (shop)", failed["remedy"])[0])
        daemon.await_ready(LIMIT_S)
        is_sound()
        daemon.start_ready()
        is_sound()
    assert len(daemon.events("source.lake_lost")) == 2
    begun = len(daemon.events("source.first_start"))
    shutil.rmtree(lake)
    lake.mkdir()
    daemon.start_ready()
    is_sound()
    assert (
        len(daemon.events("source.first_start")) == begun + 1
    )  # the loss can't be detected, but a first start is logged


def with_a_note(_shop: Database, lake: Path, _older: Path) -> None:
    shutil.rmtree(lake)
    lake.mkdir()
    (lake / "NOT_MOUNTED").touch()


def current(lake: Path) -> set[tuple[int, str]]:
    """The rows of `orders` by the newest position of each key."""
    orders = TableId("public", "orders")
    rows = sorted(raw_rows(lake, orders), key=lambda r: (r["_cdc_lsn"], r["_cdc_seq"]))
    void = [i for i, row in enumerate(rows) if row["_cdc_op"] == "t"]
    newest = {row["id"]: row for row in rows[void[-1] + 1 :]} if void else {}
    return {(r["id"], r["note"]) for r in newest.values() if r["_cdc_op"] != "d"}


def logs_of(lake: Path) -> set[str]:
    """The commits of the tables that an epoch writes."""
    return {str(path.relative_to(lake)) for path in lake.rglob("_delta_log/*.json")}


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_one_of_two_copies_continues(
    shop: Database, lake: Path, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """I5, I13: at once the second waits; later it is an older copy. Neither loses anything."""
    copy = tmp_path / "copy"
    first, second = make_daemon(config(shop, lake)), make_daemon(config(shop, copy), "second")
    for daemon in (first, second):
        daemon.program = IMPATIENT
    first.start_ready()
    assert_equal(shop, lake)
    shutil.copytree(lake, copy)
    second.start()
    await_until(lambda: second.events("source.failed"), LIMIT_S, second.tail)
    waits = second.events("source.failed")[0]
    assert waits["state"] == "backing_off"
    assert "another ingestd works on slot 'ingestd_shop' (pid" in waits["reason"]
    shop.execute("INSERT INTO orders VALUES (200, 'by the first')")
    assert_equal(shop, lake)
    assert first.sigterm() == 0
    assert "older copy" in stopped_for(second)["reason"]
    assert second.sigterm() == 0
    shutil.rmtree(copy)
    shutil.copytree(lake, copy)
    second.start_ready()
    shop.execute("DELETE FROM orders WHERE id = 200")
    assert_equal(shop, copy)
    assert second.sigterm() == 0
    first.start()
    assert "older copy" in stopped_for(first)["reason"]
    assert first.sigterm() == 0


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_first_start_killed_at_each_step_recovers(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """I6, I13: it is never taken for a lost lake."""
    daemon = make_daemon(config(shop, lake))
    for point in FIRST_START:
        daemon.environment[VARIABLE] = f"{point}=crash"
        daemon.start()
        daemon.await_end(LIMIT_S)
        shop.execute("UPDATE orders SET note = note || '+' WHERE id % 7 = 0")
    reached = [event["point"] for event in daemon.events("failpoint.reached")]
    assert reached == list(FIRST_START)
    del daemon.environment[VARIABLE]
    daemon.start_ready(LIMIT_S)
    assert_equal(shop, lake)
    assert not daemon.events("source.lake_lost")
    assert not [e for e in daemon.events("source.failed") if e["state"] == "stopped"]
    assert daemon.sigterm() == 0


@pytest.mark.thorough
def test_a_lake_of_an_earlier_version_is_adopted(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(config(shop, lake))
    daemon.start_ready()
    assert_equal(shop, lake)
    assert daemon.sigterm() == 0
    (lake / "_ingestd.json").unlink()
    daemon.start_ready()
    assert_equal(shop, lake)
    assert lake_id(lake)
    assert snapshots(lake) == 1
    assert len(epochs(lake)) >= 1


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "it is empty"),
    "garbage": (lambda path: path.write_bytes(b"\x00\xff\xfe" * 40), "it is not JSON"),
    "deep": (lambda path: path.write_bytes(b"[" * 60_000), "it has more than"),
    "large": (lambda path: path.write_bytes(b" " * (1 << 20)), "bytes"),
    "list": (lambda path: path.write_text("[]"), "not a JSON object"),
    "no_id": (lambda path: path.write_text('{"format": 1}'), '"lake" is not a UUID'),
    "no_format": (lambda path: path.write_text('{"lake": "x"}'), '"format"'),
    "format_text": (lambda path: path.write_text('{"format": "1"}'), '"format"'),
    "id_number": (lambda path: path.write_text('{"format": 1, "lake": 5}'), "not a UUID"),
    "folder": (lambda path: path.mkdir(), "it is a folder"),
    "pipe": (os.mkfifo, "it is not a regular file"),
    "dangling": (lambda path: path.symlink_to("nothing"), "it is a symbolic link"),
    "newer": (lambda path: path.write_text('{"format": 2, "lake": "x"}'), "a newer version"),
}


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_an_unreadable_marker_is_refused_and_never_overwritten(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(config(shop, lake))
    daemon.program = IMPATIENT
    daemon.start_ready()
    assert_equal(shop, lake)
    assert daemon.sigterm() == 0
    id_file = lake / "_ingestd.json"
    whole = id_file.read_bytes()
    before = confirmed(shop)
    for name, (damage, told) in DAMAGES.items():
        id_file.unlink()
        damage(id_file)
        there = content(lake)
        if name in {"newer", "garbage"}:
            for command in (
                ("check",),
                ("status",),
                ("verify", "shop"),
                ("peek", "shop", "public.orders"),
            ):
                ran = run_command(daemon.config_path, *command, columns=1000)
                assert told in ran.stdout + ran.stderr, command
                assert command[0] == "status" or ran.returncode == 1
        daemon.start()
        failed = stopped_for(daemon)
        assert told in failed["reason"]
        assert "_ingestd.json" in failed["reason"]
        assert daemon.sigterm() == 0
        assert content(lake) == there, name
        if id_file.is_dir():
            id_file.rmdir()
        else:
            id_file.unlink()
        id_file.write_bytes(whole)
    assert confirmed(shop) == before
    daemon.start_ready()
    assert_equal(shop, lake)
    assert snapshots(lake) == 1

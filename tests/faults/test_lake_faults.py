"""Lake faults under a daemon: clearly reported, nothing lost, recovered from automatically."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.conninfo import make_conninfo

from ingestd.failpoints import VARIABLE
from ingestd.model.schema import TableId
from ingestd.testing.oracle.comparison import await_caught_up
from tests.harness.command_line import run_command, snapshot_of
from tests.harness.compare import (
    assert_change_log_is_sound,
    assert_lake_equals_source,
    epochs,
)
from tests.harness.config import wal_config
from tests.harness.damages import newest
from tests.harness.flaky_network import FlakyNetwork
from tests.harness.lake_faults import (
    IMPATIENT,
    bound_by_permissions,
    can_mount,
    close_folder,
    limit_files,
    mounted,
    remount,
)
from tests.harness.object_store import ObjectStoreServer
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 120.0
ORDERS, VISITS = TableId("public", "orders"), TableId("public", "visits")
SMALL, LARGE = 10, 8_000_000
"""Bytes that are written; what is large fits neither the small disk nor the largest file."""
DISK_MB = 2
LARGEST_FILE = 1_000_000
FEW_RETRIES = {"max_retries": "1", "retry_timeout": "4s", "timeout": "2s"}
"""How long a request is tried again."""


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        "CREATE TABLE orders (id serial PRIMARY KEY, note text)",
        "CREATE TABLE visits (id serial PRIMARY KEY, note text)",
        "INSERT INTO orders (note) VALUES ('first')",
        "INSERT INTO visits (note) VALUES ('first')",
    )
    return database


def config(shop: Database, lake: Path | str, extra: str = "") -> str:
    slot = slot_of(shop)
    return wal_config(
        lake=lake,
        # `bound_by_permissions` may not read the server's password file
        dsn=make_conninfo(shop.dsn, password=shop.server.password),
        max_delay="50ms",
        source_extra=f'slot = "{slot}"\npublication = "{slot}"\ndiscover_interval = "500ms"',
        extra=extra,
    )


def slot_of(shop: Database) -> str:
    return f"ingestd_shop_{shop.name}"


def write(shop: Database, nbytes: int = SMALL) -> None:
    """Random text, which nothing makes smaller."""
    shop.execute(
        "INSERT INTO orders (note) SELECT string_agg(md5(random()::text), '')"
        f" FROM generate_series(1, {nbytes} / 32 + 1)"
    )


def assert_equal(shop: Database, lake: Path) -> None:
    tables = [ORDERS, VISITS]
    assert_lake_equals_source(shop, lake, tables=tables, slot=slot_of(shop), limit_s=LIMIT_S)


def failures(daemon: Daemon, after: int, says: str) -> list[dict[str, Any]]:
    return [e for e in daemon.events("source.failed")[after:] if says in e["reason"]]


@dataclass(frozen=True)
class Fault:
    """`cause` and `cure` stand for an operator; in between a write is attempted."""

    cause: Callable[[Path, Daemon], object]
    cure: Callable[[Path, Daemon], object]
    says: str
    remedy: str
    does: Callable[[Database], None] = write


def orders(lake: Path) -> Path:
    return lake / "shop/public/orders"


def away(name: str) -> Callable[[Path, Daemon], object]:
    return lambda lake, _: (lake / "shop" / name).rename(lake / "away")


def back(name: str) -> Callable[[Path, Daemon], object]:
    return lambda lake, _: (lake / "away").rename(lake / "shop" / name)


FAULTS: dict[str, Fault] = {
    "a limit on file sizes": Fault(
        lambda _, daemon: limit_files(daemon.pid, LARGEST_FILE),
        lambda _, daemon: limit_files(daemon.pid, None),
        says="a file would exceed the size limit",
        remedy="ulimit -f",
        does=partial(write, nbytes=LARGE),
    ),
    "permission lost in _epochs": Fault(
        lambda lake, _: close_folder(lake / "shop/_epochs"),
        lambda lake, _: close_folder(lake / "shop/_epochs", yes=False),
        says="permission denied",
        remedy="let the daemon's user read and write there",
    ),
    "_epochs removed": Fault(
        away("_epochs"), back("_epochs"), says="_epochs: the table is missing", remedy="put it back"
    ),
    "_tables removed": Fault(
        away("_tables"),
        back("_tables"),
        says="_tables: the table is missing",
        remedy="put it back",
        does=lambda shop: shop.execute("CREATE TABLE news (id int PRIMARY KEY)"),
    ),
}
MOUNT_FAULTS: dict[str, Fault] = {
    "a full disk": Fault(
        lambda _, __: None,
        lambda lake, _: remount(lake, "size=64m"),
        says="the disk is full",
        remedy="free space there; ingestd retries automatically",
        does=partial(write, nbytes=LARGE),
    ),
    "a file system that became read-only": Fault(
        lambda lake, _: remount(lake, "ro"),
        lambda lake, _: remount(lake, "rw"),
        says="the file system is read-only",
        remedy="remount it",
    ),
}


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_exactly_once_through_faults_of_the_lakes_file_system(
    shop: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    """One daemon lives through all of them; a small disk only where one can be mounted."""
    with ExitStack() as stack:
        faults = dict(FAULTS)
        if can_mount():
            stack.enter_context(mounted(lake, megabytes=DISK_MB))
            faults = {**MOUNT_FAULTS, **faults}
        daemon = make_daemon(config(shop, lake))
        stack.callback(daemon.close)  # before the disk goes
        daemon.program = bound_by_permissions(IMPATIENT)
        daemon.start_ready()
        assert_equal(shop, lake)
        for name, fault in faults.items():
            _live_through(name, fault, shop, daemon, lake)
        assert daemon.sigterm() == 0


def _live_through(name: str, fault: Fault, shop: Database, daemon: Daemon, lake: Path) -> None:
    before = len(daemon.events("source.failed"))
    fault.cause(lake, daemon)
    fault.does(shop)
    said = await_until(
        lambda: failures(daemon, before, fault.says), LIMIT_S, lambda: f"{name}\n{daemon.tail()}"
    )
    assert said[0]["state"] == "stopped", name
    assert str(lake) in said[0]["reason"], name
    assert fault.remedy in said[0]["remedy"], name
    fault.cure(lake, daemon)
    daemon.await_ready(LIMIT_S)
    write(shop)
    assert_equal(shop, lake)


# --- power cuts -------------------------------------------------------------------------------


def cut(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])


@pytest.mark.timeout(600)
def test_exactly_once_through_power_cuts_that_truncate_a_commit(
    shop: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    """I1, I3: unacknowledged changes come again; lost acknowledged ones are reported and fixed."""
    daemon = make_daemon(config(shop, lake))
    daemon.program = IMPATIENT

    def die_at(point: str) -> None:
        daemon.environment[VARIABLE] = f"{point}=crash"
        daemon.start()
        write(shop)
        daemon.await_end(LIMIT_S)
        del daemon.environment[VARIABLE]

    def goes_on(event: str, times: int) -> None:
        daemon.start_ready(LIMIT_S)
        assert_equal(shop, lake)
        assert len(daemon.events(event)) == times

    for times, (point, folder, share) in enumerate(
        (
            ("sink.epochs_commit.before", orders(lake), 0.5),  # the table's first commit
            ("sink.epochs_commit.before", orders(lake), 0),
            ("sink.epochs_commit.after", lake / "shop/_epochs", 0.5),
        ),
        1,
    ):
        die_at(point)
        cut(newest(folder), share)
        goes_on("lake.file_set_aside", times)
        daemon.sigkill()
    assert_change_log_is_sound(shop, lake)
    assert daemon.events("source.slot_lost") == []
    assert {fault["state"] for fault in daemon.events("source.failed")} <= {"backing_off"}

    # A disk that lied: confirmed rows are missing.
    write(shop)
    goes_on("source.lake_lost", 0)
    assert daemon.sigterm() == 0
    cut(newest(lake / "shop/_epochs"), 0)
    daemon.start()
    said = await_until(lambda: failures(daemon, 0, "older copy"), LIMIT_S, daemon.tail)
    assert said[0]["state"] == "stopped"
    assert daemon.sigterm() == 0
    daemon.start("--accept-empty-lake", "shop")
    goes_on("source.lake_lost", 1)

    daemon.sigkill()
    cut(newest(lake / "shop/public/visits"), 0.5)
    daemon.start()
    [event] = await_until(lambda: daemon.events("table.stopped"), LIMIT_S, daemon.tail)
    assert "public/visits: commit" in event["reason"]
    answer = daemon.get("/readyz")
    assert answer is not None
    assert answer[0] == HTTPStatus.SERVICE_UNAVAILABLE
    shutil.rmtree(lake / "shop/public/visits")
    done = run_command(daemon.config_path, *snapshot_of(event["remedy"]))
    assert done.returncode == 0, done.stderr
    daemon.await_ready(LIMIT_S)
    assert_equal(shop, lake)
    assert daemon.sigterm() == 0


# --- object stores ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running_store() -> Iterator[ObjectStoreServer]:
    with ObjectStoreServer() as server:
        yield server


@pytest.fixture
def store(running_store: ObjectStoreServer, way: str) -> ObjectStoreServer:
    running_store.begin_anew(by_deltalake=way == "deltalake")
    running_store.recover()
    return running_store


@pytest.mark.parametrize(
    "way", ["obstore", pytest.param("deltalake", marks=pytest.mark.thorough)], indirect=True
)
@pytest.mark.timeout(600)
def test_exactly_once_through_faults_of_a_store(
    shop: Database, make_daemon: MakeDaemon, store: ObjectStoreServer, way: str, tmp_path: Path
) -> None:
    for_ever = 10**6
    with FlakyNetwork(store.port) as network:
        endpoint = f"http://127.0.0.1:{network.port}"
        section = store.config_with(**FEW_RETRIES, AWS_ENDPOINT_URL=endpoint)
        daemon = make_daemon(config(shop, store.uri, section))
        daemon.program = IMPATIENT
        daemon.start_ready(LIMIT_S)

        def live_through(cause: Callable[[], object], cure: Callable[[], object]) -> dict[str, Any]:
            before = len(daemon.events("source.failed"))
            cause()
            write(shop)
            said = await_until(lambda: failures(daemon, before, "lake s3://"), LIMIT_S, daemon.tail)
            cure()
            committed = len(daemon.events("epoch.committed"))
            write(shop)
            await_until(
                lambda: len(daemon.events("epoch.committed")) > committed, LIMIT_S, daemon.tail
            )
            return said[0]

        for method in ("PUT", "GET") if way == "deltalake" else ("PUT",):  # it reads nothing else
            fault = live_through(
                partial(store.expire, method, "_delta_log", for_ever), store.recover
            )
            assert (fault["state"], "ExpiredToken" in fault["reason"]) == ("stopped", True)
            assert "renew the credentials" in fault["remedy"]
        for refuse in (store.refuse, store.break_down):
            fault = live_through(partial(refuse, "PUT", "shop/", for_ever), store.recover)
            assert fault["state"] == "backing_off"
        for cut_off in (network.stall, network.blackhole):
            fault = live_through(cut_off, network.heal)
            assert fault["state"] == "backing_off"
        store.lose_answer("PUT", "orders/_delta_log/")
        network.reset()
        write(shop)
        local = tmp_path / "local"
        await_until(lambda: store.faults_left() == [], LIMIT_S, daemon.tail)
        with shop.connect() as connection:
            await_caught_up(connection, slot_of(shop), LIMIT_S)
        store.download(local)
        assert_equal(shop, local)
        assert_change_log_is_sound(shop, local)
        assert [row["epoch"] for row in epochs(local)] == list(range(1, len(epochs(local)) + 1))
        assert daemon.sigterm() == 0

"""A lake's storage that does not answer: the source is not ready, and reports the path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ingestd.failpoints import VARIABLE
from tests.harness.config import wal_config
from tests.harness.impatient import STORAGE_S
from tests.harness.lake_faults import IMPATIENT
from tests.harness.object_store import ObjectStoreServer
from tests.harness.shop_servers import assert_equal
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
ENDS_WITHIN_S = 12.0
"""The daemon's 10 s, and what a loaded machine adds."""


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    return database


def write(shop: Database, number: int) -> None:
    shop.execute(f"INSERT INTO orders VALUES ({number}, 'x')")


def await_not_ready(daemon: Daemon) -> str:
    """Return what /readyz says of the storage, once the log has it too."""
    before = len(waits(daemon))

    def said() -> str | None:
        answer = daemon.get("/readyz")
        is_told = answer is not None and "has not answered for" in answer[1]
        return answer[1] if answer is not None and is_told else None

    found = await_until(said, LIMIT_S, daemon.tail)
    await_until(lambda: len(waits(daemon)) > before, LIMIT_S, daemon.tail)
    assert found is not None
    return found


def waits(daemon: Daemon) -> list[dict[str, Any]]:
    return daemon.events("storage.waits")


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_a_hung_file_system_is_reported_and_a_stop_is_in_time(
    shop: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    daemon = make_daemon(wal_config(lake=lake, dsn=shop.dsn))
    daemon.program = IMPATIENT
    daemon.start_ready()
    write(shop, 1)
    assert_equal(shop, lake)
    assert daemon.sigterm() == 0
    # The first three are the fences of the start.
    daemon.environment[VARIABLE] = f"sink.commit_put.before=delay:{3 * STORAGE_S}@4"
    daemon.start_ready()
    assert not waits(daemon)
    write(shop, 2)
    said = await_not_ready(daemon)
    assert f": {lake}/shop/" in said
    assert "remedy: " in said
    status = daemon.status()
    assert status is not None
    wait = status["sources"]["shop"]["storage_wait"]
    assert wait["seconds"] >= STORAGE_S
    assert wait["path"].startswith(f"{lake}/shop/")
    assert status["ready"] is False
    await_until(lambda: daemon.events("storage.answered"), LIMIT_S, daemon.tail)
    daemon.await_ready()
    assert waits(daemon)[0]["path"] == wait["path"]
    assert_equal(shop, lake)
    assert daemon.sigterm() == 0

    daemon.environment[VARIABLE] = "sink.commit_put.before=delay:300@4+"
    daemon.start_ready()
    write(shop, 3)
    await_not_ready(daemon)
    assert daemon.sigterm(ENDS_WITHIN_S) == 75
    [cut] = daemon.events("daemon.cut_off")
    assert any(str(lake) in what for what in cut["under_way"])
    del daemon.environment[VARIABLE]
    daemon.start_ready()
    assert_equal(shop, lake)
    assert daemon.sigterm() == 0


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_an_object_store_that_stops_answering_is_reported(
    shop: Database, make_daemon: MakeDaemon
) -> None:
    with ObjectStoreServer() as store:
        daemon = make_daemon(wal_config(lake=store.uri, dsn=shop.dsn, extra=store.config))
        daemon.program = IMPATIENT
        daemon.start_ready()
        write(shop, 1)
        await_until(lambda: daemon.events("epoch.committed"), LIMIT_S, daemon.tail)
        store.freeze()
        write(shop, 2)
        assert f": {store.uri}/shop/" in await_not_ready(daemon)
        store.thaw()
        await_until(lambda: daemon.events("storage.answered"), LIMIT_S, daemon.tail)
        daemon.await_ready(LIMIT_S)
        store.freeze()
        write(shop, 3)
        await_not_ready(daemon)
        assert daemon.sigterm(ENDS_WITHIN_S) == 75

"""When the daemon registers tables in a catalog, and what that delays (nothing)."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
import structlog
from pydantic import SecretStr
from structlog.testing import capture_logs

from ingestd.app.catalog_registration import (
    EVERY_S,
    FIRST_RETRY_S,
    MOST_RETRIES,
    CatalogRegistration,
)
from ingestd.catalogs.names import NameOutcome, NameReport
from ingestd.config import CatalogSettings
from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.lake_state import TableState
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import DaemonStatus, SourceStatus, TableStatus
from ingestd.testing.fakes.lake import MemoryLakeFactory

if TYPE_CHECKING:
    from collections.abc import Sequence

AT = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = CatalogSettings(kind="unity", uri="http://127.0.0.1:1", catalog="main")
DOWN = TransientError("it is down", reason="catalog", remedy="start it")


class World:
    """A daemon with one source, a clock, and a catalog that answers what `answers` has next."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.tried = 0
        self.answers: list[list[NameReport] | Exception] = []
        source = SourceStatus("shop", AT, epoch=1)
        self.status = DaemonStatus("1", AT, {"shop": source})
        self.metrics = Metrics()
        self.registration = CatalogRegistration(
            SETTINGS,
            MemoryLakeFactory(),
            self.status,
            self.metrics,
            structlog.get_logger("ingestd"),
            register=self.register,
            monotonic=lambda: self.now,
        )

    def register(self, *_: object) -> Sequence[NameReport]:
        self.tried += 1
        answer = self.answers.pop(0) if self.answers else []
        if isinstance(answer, Exception):
            raise answer
        return answer

    def set_table(self, name: str, state: TableState = TableState.LIVE) -> None:
        self.status.sources["shop"].tables[name] = TableStatus(name, state, AT)

    async def after(self, seconds: float) -> int:
        """Return how often the catalog has been asked after this time."""
        self.now += seconds
        await self.registration.register_due()
        return self.tried

    def faults(self) -> float | None:
        return self.metrics.registry.get_sample_value("ingestd_catalog_faults", {"source": "shop"})


@pytest.fixture
def world() -> World:
    return World()


async def test_it_is_asked_when_tables_change_and_once_an_hour(world: World) -> None:
    assert await world.after(1) == 0  # no table yet
    world.set_table("public.a")
    assert [await world.after(5) for _ in range(3)] == [1, 1, 1]
    world.set_table("public.b")
    assert [await world.after(5) for _ in range(5)] == [1, 1, 1, 2, 2]  # not at once again
    world.set_table("public.b", TableState.DROPPED)
    assert [await world.after(FIRST_RETRY_S) for _ in range(2)] == [3, 3]
    assert await world.after(EVERY_S - FIRST_RETRY_S - 10) == 3
    assert await world.after(10) == 4


async def test_a_fault_is_logged_once_and_retried_a_few_times(world: World) -> None:
    world.set_table("public.a")
    world.answers = [DOWN] * 100
    with capture_logs() as logs:
        tried = [await world.after(FIRST_RETRY_S) for _ in range(int(EVERY_S / FIRST_RETRY_S))]
    assert tried[-1] == 1 + MOST_RETRIES
    [log] = logs
    assert log == {
        "event": "catalog.failed",
        "log_level": "warning",
        "source": "shop",
        "reason": "it is down",
        "remedy": "start it",
        "faults": 1,
    }
    assert world.faults() == 1
    world.answers = [[NameReport("main.shop.a", NameOutcome.CREATED)]]
    world.set_table("public.b")
    with capture_logs() as logs:
        await world.after(1)
    assert [each["event"] for each in logs] == ["catalog.registered"]
    assert world.faults() == 0


async def test_an_unexpected_error_is_reported_without_its_text(world: World) -> None:
    world.set_table("public.a")
    world.answers = [ValueError("a secret")]
    with capture_logs() as logs:
        await world.after(1)
    assert logs[0]["reason"] == "the catalog's library failed: ValueError"
    assert "secret" not in str(logs)


async def test_a_name_that_is_refused_is_counted(world: World) -> None:
    world.set_table("public.a")
    refused = NameReport("main.shop.a", NameOutcome.FAILED, OperatorError("taken"))
    world.answers = [[refused, NameReport("main.shop.b", NameOutcome.CREATED)]]
    await world.after(1)
    assert world.faults() == 1


async def test_a_source_that_is_removed_meanwhile_has_no_series(world: World) -> None:
    """Nothing would ever set it to 0 again, and its alert would stay."""
    world.set_table("public.a")

    def is_removed(*_: object) -> Sequence[NameReport]:
        del world.status.sources["shop"]
        world.metrics.forget_source("shop")
        raise DOWN

    world.registration.register = is_removed
    await world.after(1)
    assert world.faults() is None


async def test_a_catalog_that_hangs_can_be_left(world: World) -> None:
    """Nothing waits for its thread: neither the cancellation nor the end of the process."""
    world.set_table("public.a")
    entered, released = threading.Event(), threading.Event()

    def hangs(*_: object) -> Sequence[NameReport]:
        entered.set()
        released.wait(60)
        return []

    world.registration.register = hangs
    task = asyncio.create_task(world.registration.run())
    await asyncio.to_thread(entered.wait, 60)
    [thread] = [each for each in threading.enumerate() if each.name == "catalog"]
    assert thread.daemon
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    released.set()
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()


def test_a_token_is_not_in_the_settings_text() -> None:
    found = CatalogSettings(
        kind="unity", uri="https://h", catalog="m", token=SecretStr("0123456789abcdef")
    )
    assert "0123456789abcdef" not in repr(found)
    assert found.schema_of("shop") == "shop_raw"

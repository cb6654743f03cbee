"""Following a requested snapshot through a daemon's statuses."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.errors import ConfigError, OperatorError, TransientError
from ingestd.observe import snapshot_request as module
from ingestd.observe.http import HttpServer
from ingestd.observe.metrics import Metrics
from ingestd.observe.snapshot_request import Following, ask_for_snapshot, follow
from ingestd.observe.status import DaemonStatus, SourceState, SourceStatus, to_json
from ingestd.positions import Lsn
from ingestd.quantities import Address
from ingestd.recorded import TableState
from ingestd.redaction import Redactor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingestd.schema import TableId

T0 = datetime(2026, 1, 2, tzinfo=UTC)
A, B = "public.a", "public.b"


class Daemon:
    """A daemon's status, a second later at each change."""

    def __init__(self) -> None:
        self.now = T0
        self.shop = SourceStatus("shop", T0)
        self.status = DaemonStatus("0", T0, {"shop": self.shop})
        self.shop.enter(SourceState.STREAMING, T0)
        for name in (A, B):
            self.enter(name, TableState.LIVE, lsn=1)

    def enter(
        self, name: str, state: TableState, why: str | None = None, *, lsn: int | None = None
    ) -> None:
        self.now += timedelta(seconds=1)
        error = None if why is None else OperatorError(why, remedy="mend it")
        at = None if lsn is None else Lsn(lsn)
        self.shop.table(name, state, self.now, error, snapshot_lsn=at)

    def request(self, source: str, tables: Sequence[TableId]) -> None:
        assert source == "shop"
        for table in tables:
            self.shop.tables[str(table)].snapshot_requested = True

    def ask(self, *names: str) -> Following:
        before = to_json(self.status)
        for name in names:
            self.shop.tables[name].snapshot_requested = True
        return Following("shop", names, before)

    def json(self) -> dict[str, Any]:
        return to_json(self.status)


def test_it_is_over_when_every_table_was_read_again() -> None:
    daemon = Daemon()
    following = daemon.ask(A, B)
    assert following.look(daemon.json()) == [
        f"{A}: waits for its snapshot",
        f"{B}: waits for its snapshot",
    ]
    assert following.look(daemon.json()) == []
    daemon.enter(A, TableState.SNAPSHOTTING)
    daemon.shop.tables[A].read(0.5, 100, daemon.now)
    assert following.look(daemon.json()) == [f"{A}: snapshotting, 50% read"]
    daemon.enter(A, TableState.LIVE, lsn=2)
    daemon.enter(B, TableState.SNAPSHOTTING)
    assert following.look(daemon.json()) == [f"{A}: live", f"{B}: snapshotting"]
    assert (following.is_over, following.left) == (False, [B])
    daemon.enter(B, TableState.LIVE, lsn=2)
    assert following.look(daemon.json()) == [f"{B}: live"]
    assert following.is_over


def test_a_snapshot_between_two_looks_is_seen() -> None:
    daemon = Daemon()
    following = daemon.ask(A)
    daemon.enter(A, TableState.SNAPSHOTTING)
    daemon.enter(A, TableState.LIVE, lsn=2)
    following.look(daemon.json())
    assert following.is_over


def test_a_stopped_table_comes_back() -> None:
    daemon = Daemon()
    daemon.enter(A, TableState.STOPPED, "no key")
    following = daemon.ask(A)
    following.look(daemon.json())
    assert not following.is_over
    daemon.enter(A, TableState.SNAPSHOTTING)
    daemon.enter(A, TableState.LIVE, lsn=1)
    following.look(daemon.json())
    assert following.is_over


@pytest.mark.parametrize("was_stopped", [False, True])
@pytest.mark.parametrize("state", [TableState.STOPPED, TableState.DROPPED])
def test_a_table_that_ends_otherwise_is_an_error(state: TableState, *, was_stopped: bool) -> None:
    daemon = Daemon()
    if was_stopped:
        daemon.enter(A, TableState.STOPPED, "no key")
    following = daemon.ask(A)
    following.look(daemon.json())
    daemon.enter(A, TableState.SNAPSHOTTING)
    daemon.enter(A, state, "no key")
    with pytest.raises(OperatorError) as caught:
        following.look(daemon.json())
    assert caught.value.what == f"table {A} is {state}: no key"
    assert caught.value.remedy == "mend it"


def test_a_request_that_was_lost_is_transient() -> None:
    daemon = Daemon()
    following = daemon.ask(A)
    daemon.shop.tables[A].snapshot_requested = False
    with pytest.raises(TransientError, match="the source began anew") as caught:
        following.look(daemon.json())
    assert caught.value.remedy == f"ingestd snapshot shop {A}"
    daemon.status.started_at += timedelta(seconds=9)
    with pytest.raises(TransientError, match="the daemon began anew"):
        following.look(daemon.json())


def test_a_daemon_that_starts_again_in_the_midst_is_followed() -> None:
    daemon = Daemon()
    following = daemon.ask(A)
    daemon.enter(A, TableState.SNAPSHOTTING)
    following.look(daemon.json())
    again = Daemon()
    del again.shop.tables[A]
    again.shop.enter(SourceState.STARTING, T0)
    assert following.look(again.json()) == ["source shop: starting"]
    again.shop.enter(SourceState.SNAPSHOTTING, T0)
    again.enter(A, TableState.SNAPSHOTTING)
    assert following.look(again.json()) == ["source shop: goes on"]
    again.enter(A, TableState.LIVE, lsn=3)
    following.look(again.json())
    assert following.is_over


def test_a_source_that_fails_meanwhile_is_told() -> None:
    daemon = Daemon()
    following = daemon.ask(A)
    following.look(daemon.json())
    daemon.shop.enter(SourceState.BACKING_OFF, T0, OperatorError("connection lost"))
    assert following.look(daemon.json()) == ["source shop: backing_off: connection lost"]


# --- with a server ---------------------------------------------------------------------------


def server(daemon: Daemon) -> HttpServer:
    return HttpServer(Address("127.0.0.1", 0), Metrics(), daemon.status, Redactor(), daemon.request)


async def test_ask_and_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.01)
    daemon, told = Daemon(), list[str]()
    loop = asyncio.get_running_loop()

    def tell(line: str) -> None:
        told.append(line)
        if len(told) == 1:
            loop.call_soon_threadsafe(daemon.enter, A, TableState.SNAPSHOTTING)
        elif len(told) == 2:
            loop.call_soon_threadsafe(lambda: daemon.enter(A, TableState.LIVE, lsn=2))

    async with server(daemon) as at:
        asked = await asyncio.to_thread(
            ask_for_snapshot, at.address, "shop", [A, A], sources={"shop"}
        )
        assert asked.tables == [A]
        await asyncio.to_thread(follow, at.address, asked, 15.0, tell=tell)
    assert told == [f"{A}: waits for its snapshot", f"{A}: snapshotting", f"{A}: live"]


async def test_a_limit_ends_the_waiting_only() -> None:
    daemon = Daemon()
    async with server(daemon) as at:
        asked = await asyncio.to_thread(ask_for_snapshot, at.address, "shop", [A])
        with pytest.raises(TransientError, match=r"not live within the limit: public\.a") as caught:
            await asyncio.to_thread(follow, at.address, asked, 0.001, tell=lambda _: None)
    assert caught.value.remedy == "the daemon goes on all the same: see `ingestd status`"


async def test_a_daemon_that_answers_no_more_ends_the_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SILENT_LIMIT_S", 0.01)
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.01)
    daemon = Daemon()
    async with server(daemon) as at:
        asked = await asyncio.to_thread(ask_for_snapshot, at.address, "shop", [A])
        gone = at.address
    with pytest.raises(TransientError, match="answers no more"):
        await asyncio.to_thread(follow, gone, asked, 15.0, tell=lambda _: None)
    with pytest.raises(OperatorError, match="no ingestd daemon answers on 127"):
        await asyncio.to_thread(ask_for_snapshot, gone, "shop", [A])


async def test_another_daemon_is_not_asked() -> None:
    daemon = Daemon()
    async with server(daemon) as at:
        with pytest.raises(OperatorError, match="is another: its sources are shop"):
            await asyncio.to_thread(ask_for_snapshot, at.address, "crm", [A], sources={"crm"})
    assert not daemon.shop.tables[A].snapshot_requested


def test_a_table_without_schema_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="orders"):
        ask_for_snapshot(Address("127.0.0.1", 1), "shop", ["orders"])

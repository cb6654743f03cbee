"""Following a requested snapshot through a daemon's statuses."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.config.redaction import Redactor
from ingestd.config.units import Address
from ingestd.http.daemon_identity import DaemonIdentity
from ingestd.http.server import HttpServer
from ingestd.http.snapshot_client import (
    Following,
    TableProgress,
    ask_for_snapshot,
    ask_to_cancel,
    follow,
)
from ingestd.model.errors import ConfigError, OperatorError, TransientError
from ingestd.model.lake_state import TableState
from ingestd.model.lsn import Lsn
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import (
    DaemonStatus,
    SnapshotOutcome,
    SourceState,
    SourceStatus,
)
from ingestd.observe.status_json import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ingestd.model.schema import TableId

T0 = datetime(2026, 1, 2, tzinfo=UTC)
A, B = "public.a", "public.b"


class Daemon:
    """A daemon's status, a second later at each change."""

    def __init__(self) -> None:
        self.now = T0
        self.shop = SourceStatus("shop", T0)
        self.status = DaemonStatus("0", T0, {"shop": self.shop})
        self.where: str | None = None
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

    def end(self, name: str, outcome: SnapshotOutcome, why: str | None = None) -> None:
        self.now += timedelta(seconds=1)
        error = None if why is None else OperatorError(why, remedy="mend it")
        self.shop.tables[name].end_snapshot(outcome, self.now, error)

    def request_snapshot(
        self, source: str, tables: Sequence[TableId], where: str | None = None
    ) -> None:
        assert source == "shop"
        self.where = where
        for table in tables:
            self.shop.tables[str(table)].snapshot_requested = True

    def cancel_snapshot(self, source: str, tables: Sequence[TableId]) -> None:
        assert source == "shop"
        for table in tables:
            self.end(str(table), SnapshotOutcome.CANCELLED)

    def ask(self, *names: str, is_partial: bool = False) -> Following:
        before = to_json(self.status)
        for name in names:
            self.shop.tables[name].snapshot_requested = True
        return Following("shop", names, before, is_partial=is_partial)

    def json(self) -> dict[str, Any]:
        return to_json(self.status)


def test_it_is_over_when_every_table_was_read_again() -> None:
    daemon = Daemon()
    following = daemon.ask(A, B)
    assert shown(following, daemon) == [(A, "waiting", 0.0), (B, "waiting", 0.0)]
    daemon.enter(A, TableState.SNAPSHOTTING)
    daemon.shop.tables[A].read(0.0, 0, daemon.now)
    daemon.shop.tables[A].read(0.5, 100, daemon.now + timedelta(seconds=3))
    assert following.update(daemon.json())[0] == TableProgress(
        A, "snapshotting", 0.5, 100, 200, 3.0, is_over=False
    )
    daemon.enter(A, TableState.LIVE, lsn=2)
    daemon.enter(B, TableState.SNAPSHOTTING)
    assert shown(following, daemon) == [(A, "live", 1.0), (B, "snapshotting", 0.0)]
    assert (following.is_over, following.remaining) == (False, [B])
    daemon.enter(B, TableState.LIVE, lsn=2)
    assert following.update(daemon.json()) == [
        TableProgress(B, "live", 1.0, 0, None, None, is_over=True)
    ]
    assert following.is_over
    assert following.update(daemon.json()) == []


def shown(following: Following, daemon: Daemon) -> list[tuple[str, str, float]]:
    return [(p.table, p.state, p.ratio) for p in following.update(daemon.json())]


def test_a_partial_snapshot_is_over_when_it_is_said_to_be() -> None:
    daemon = Daemon()
    daemon.end(A, SnapshotOutcome.DONE)  # one before
    following = daemon.ask(A, is_partial=True)
    assert shown(following, daemon) == [(A, "waiting", 0.0)]
    daemon.shop.tables[A].read(0.25, 10, daemon.now)
    daemon.enter(A, TableState.LIVE)
    assert shown(following, daemon) == [(A, "live", 0.25)]
    daemon.end(A, SnapshotOutcome.DONE)
    assert shown(following, daemon) == [(A, "live", 1.0)]
    assert following.is_over


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_cancelled_snapshot_ends_the_watching(*, is_partial: bool) -> None:
    daemon = Daemon()
    following = daemon.ask(A, is_partial=is_partial)
    if not is_partial:
        daemon.enter(A, TableState.SNAPSHOTTING)
    daemon.shop.tables[A].read(0.25, 10, daemon.now)
    following.update(daemon.json())
    daemon.end(A, SnapshotOutcome.CANCELLED)
    with pytest.raises(OperatorError, match=r"public\.a: its snapshot was cancelled"):
        following.update(daemon.json())


def test_a_partial_snapshot_that_fails_says_why() -> None:
    daemon = Daemon()
    following = daemon.ask(A, is_partial=True)
    daemon.end(A, SnapshotOutcome.FAILED, "no column x")
    with pytest.raises(OperatorError) as caught:
        following.update(daemon.json())
    assert (caught.value.what, caught.value.remedy) == (f"table {A}: no column x", "mend it")


def test_a_partial_snapshot_lost_at_a_restart_is_transient() -> None:
    daemon = Daemon()
    following = daemon.ask(A, is_partial=True)
    again = Daemon()
    again.status.started_at += timedelta(seconds=9)
    with pytest.raises(TransientError, match="the daemon restarted"):
        following.update(again.json())


def test_a_snapshot_between_two_looks_is_seen() -> None:
    daemon = Daemon()
    following = daemon.ask(A)
    daemon.enter(A, TableState.SNAPSHOTTING)
    daemon.enter(A, TableState.LIVE, lsn=2)
    following.update(daemon.json())
    assert following.is_over


def test_a_stopped_table_comes_back() -> None:
    daemon = Daemon()
    daemon.enter(A, TableState.STOPPED, "no key")
    following = daemon.ask(A)
    following.update(daemon.json())
    assert not following.is_over
    daemon.enter(A, TableState.SNAPSHOTTING)
    daemon.enter(A, TableState.LIVE, lsn=1)
    following.update(daemon.json())
    assert following.is_over


@pytest.mark.parametrize("was_stopped", [False, True])
@pytest.mark.parametrize("state", [TableState.STOPPED, TableState.DROPPED])
def test_a_table_that_ends_otherwise_is_an_error(state: TableState, *, was_stopped: bool) -> None:
    daemon = Daemon()
    if was_stopped:
        daemon.enter(A, TableState.STOPPED, "no key")
    following = daemon.ask(A)
    following.update(daemon.json())
    daemon.enter(A, TableState.SNAPSHOTTING)
    daemon.enter(A, state, "no key")
    with pytest.raises(OperatorError) as caught:
        following.update(daemon.json())
    assert caught.value.what == f"table {A} is {state}: no key"
    assert caught.value.remedy == "mend it"


def test_a_request_that_was_lost_is_transient() -> None:
    daemon = Daemon()
    following = daemon.ask(A)
    daemon.shop.tables[A].snapshot_requested = False
    with pytest.raises(TransientError, match="the source restarted") as caught:
        following.update(daemon.json())
    assert caught.value.remedy == f"ingestd snapshot shop {A}"
    daemon.status.started_at += timedelta(seconds=9)
    with pytest.raises(TransientError, match="the daemon restarted"):
        following.update(daemon.json())


def test_a_daemon_that_starts_again_in_the_midst_is_followed() -> None:
    daemon = Daemon()
    following = daemon.ask(A)
    daemon.enter(A, TableState.SNAPSHOTTING)
    following.update(daemon.json())
    again = Daemon()
    del again.shop.tables[A]
    again.shop.enter(SourceState.STARTING, T0)
    assert (following.update(again.json()), following.source_line(again.json())) == ([], "starting")
    again.shop.enter(SourceState.SNAPSHOTTING, T0)
    again.enter(A, TableState.SNAPSHOTTING)
    assert shown(following, again) == [(A, "snapshotting", 0.0)]
    assert following.source_line(again.json()) == ""
    again.enter(A, TableState.LIVE, lsn=3)
    following.update(again.json())
    assert following.is_over


def test_a_source_that_fails_meanwhile_is_reported() -> None:
    daemon = Daemon()
    following = daemon.ask(A)
    following.update(daemon.json())
    daemon.shop.enter(SourceState.BACKING_OFF, T0, OperatorError("connection lost"))
    assert following.source_line(daemon.json()) == "backing_off: connection lost"


def test_a_source_removed_from_the_config_ends_the_watching() -> None:
    daemon = Daemon()
    following = daemon.ask(A)
    daemon.status.sources.clear()
    with pytest.raises(OperatorError, match="source shop was removed from the daemon's config"):
        following.update(daemon.json())


# --- with a server ---------------------------------------------------------------------------


def server(daemon: Daemon) -> HttpServer:
    return HttpServer(Address("127.0.0.1", 0), Metrics(), daemon.status, Redactor(), daemon)


class Seen:
    """A display that records its updates; `then`: what to do at the first, the second one..."""

    def __init__(self, *then: Callable[[], object]) -> None:
        self.sources: list[str] = []
        self.tables: list[TableProgress] = []
        self._then = list(then)

    def source(self, line: str) -> None:
        self.sources.append(line)

    def table(self, progress: TableProgress) -> None:
        self.tables.append(progress)
        if self._then:
            self._then.pop(0)()


SHOP, CRM = DaemonIdentity("", {"shop": ""}), DaemonIdentity("", {"crm": ""})


async def test_ask_and_follow() -> None:
    quickly = partial(follow, poll_s=0.01)
    daemon = Daemon()
    loop = asyncio.get_running_loop()
    seen = Seen(
        lambda: loop.call_soon_threadsafe(daemon.enter, A, TableState.SNAPSHOTTING),
        lambda: loop.call_soon_threadsafe(lambda: daemon.enter(A, TableState.LIVE, lsn=2)),
    )
    async with server(daemon) as at:
        asked = await asyncio.to_thread(ask_for_snapshot, at.address, "shop", [A, A], expected=SHOP)
        assert (asked.tables, asked.is_partial, daemon.where) == ([A], False, None)
        await asyncio.to_thread(quickly, at.address, asked, 15.0, seen)
    assert {p.state for p in seen.tables} == {"waiting", "snapshotting", "live"}
    assert [p.is_over for p in seen.tables[-2:]] == [False, True]
    assert set(seen.sources) == {""}


async def test_ask_for_some_rows_then_cancel() -> None:
    daemon = Daemon()
    async with server(daemon) as at:
        asked = await asyncio.to_thread(ask_for_snapshot, at.address, "shop", [A], where="id > 1")
        assert (asked.is_partial, daemon.where) == (True, "id > 1")
        names = await asyncio.to_thread(ask_to_cancel, at.address, "shop", [A, A], expected=SHOP)
        assert names == [A]
        with pytest.raises(OperatorError, match="was cancelled"):
            await asyncio.to_thread(follow, at.address, asked, 15.0, Seen())
        with pytest.raises(OperatorError, match="another daemon"):
            await asyncio.to_thread(ask_to_cancel, at.address, "crm", [A], expected=CRM)


async def test_a_limit_ends_the_waiting_only() -> None:
    daemon = Daemon()
    async with server(daemon) as at:
        asked = await asyncio.to_thread(ask_for_snapshot, at.address, "shop", [A])
        with pytest.raises(
            TransientError, match=r"not live within the time limit: public\.a"
        ) as caught:
            await asyncio.to_thread(follow, at.address, asked, 0.001, Seen())
    assert caught.value.remedy == "the daemon continues; follow it with `ingestd status`"


async def test_a_daemon_that_answers_no_more_ends_the_waiting() -> None:
    quickly = partial(follow, poll_s=0.01, silent_limit_s=0.01)
    daemon = Daemon()
    async with server(daemon) as at:
        asked = await asyncio.to_thread(ask_for_snapshot, at.address, "shop", [A])
        gone = at.address
    with pytest.raises(TransientError, match="no longer responds"):
        await asyncio.to_thread(quickly, gone, asked, 15.0, Seen())
    with pytest.raises(OperatorError, match="no ingestd daemon answers on 127"):
        await asyncio.to_thread(ask_for_snapshot, gone, "shop", [A])


async def test_another_daemon_is_not_asked() -> None:
    daemon = Daemon()
    async with server(daemon) as at:
        with pytest.raises(OperatorError, match=r"another daemon .*: its sources are shop"):
            await asyncio.to_thread(ask_for_snapshot, at.address, "crm", [A], expected=CRM)
    assert not daemon.shop.tables[A].snapshot_requested


def test_a_table_without_schema_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="orders"):
        ask_for_snapshot(Address("127.0.0.1", 1), "shop", ["orders"])

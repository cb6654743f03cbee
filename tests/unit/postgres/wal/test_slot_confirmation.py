"""What reports a confirmed position: the stream while it is open, the advance, or neither."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from ingestd.model.lsn import Lsn
from ingestd.postgres.wal.replication_stream import ReplicationStream
from ingestd.postgres.wal.slot_confirmation import SlotConfirmation
from ingestd.postgres.wal.slots.advance import SlotAdvance


class RecordedAdvance:
    """Records where a slot would be moved."""

    def __init__(self) -> None:
        self.queried_id = ""
        self.calls: list[tuple[str, Lsn]] = []

    def start_at(self, position: Lsn) -> None:
        self.calls.append(("start_at", position))

    async def advance_to(self, position: Lsn) -> None:
        self.calls.append(("advance", position))

    async def settle(self) -> None:
        self.calls.append(("settle", Lsn(0)))

    async def close(self) -> None:
        self.calls.append(("close", Lsn(0)))


class RecordedStream:
    """Records what a stream reports; closing it waits for `may_close`."""

    def __init__(self) -> None:
        self.reported: list[Lsn] = []
        self.is_reporting = False
        self.has_reported = asyncio.Event()
        self.may_close = asyncio.Event()

    def begin_reporting(self) -> None:
        self.is_reporting = True

    async def report_durable(self, position: Lsn) -> None:
        self.reported.append(position)
        self.has_reported.set()

    async def close(self) -> None:
        await self.may_close.wait()


def begun() -> tuple[SlotConfirmation, RecordedAdvance]:
    advance = RecordedAdvance()
    confirmation = SlotConfirmation(cast("SlotAdvance", advance))
    confirmation.begin(Lsn(10), "1")
    confirmation.record_received(Lsn(100))
    return confirmation, advance


async def test_i1_nothing_is_confirmed_that_was_not_delivered() -> None:
    confirmation, advance = begun()
    with pytest.raises(ValueError, match="beyond what was delivered"):
        await confirmation.confirm(Lsn(101))
    assert confirmation.confirmed == Lsn(0)
    assert advance.calls == [("start_at", Lsn(10))]


async def test_one_reporter_at_a_time() -> None:
    confirmation, advance = begun()
    stream = RecordedStream()
    given: list[Lsn] = []

    async def opened(slot_at: Lsn) -> ReplicationStream:
        given.append(slot_at)
        return cast("ReplicationStream", stream)

    async def streams() -> None:
        async with confirmation.streaming(opened):
            await confirmation.confirm(Lsn(30))

    await confirmation.confirm(Lsn(20))
    streaming = asyncio.create_task(streams())
    await stream.has_reported.wait()
    await confirmation.confirm(Lsn(40))  # the stream is being closed: its walsender has the slot
    assert stream.reported == [Lsn(30)]
    stream.may_close.set()
    await streaming
    await confirmation.confirm(Lsn(50))
    assert stream.is_reporting
    assert given == [Lsn(20)]
    assert advance.calls == [
        ("start_at", Lsn(10)),
        ("advance", Lsn(20)),
        ("settle", Lsn(0)),
        ("start_at", Lsn(40)),
        ("advance", Lsn(50)),
    ]


async def test_a_stream_that_can_not_be_opened_leaves_the_advance() -> None:
    confirmation, advance = begun()

    async def refused(_: Lsn) -> ReplicationStream:
        msg = "no route"
        raise OSError(msg)

    with pytest.raises(OSError, match="no route"):
        async with confirmation.streaming(refused):
            pass
    await confirmation.confirm(Lsn(20))
    assert advance.calls[-1] == ("advance", Lsn(20))


async def test_a_commit_is_requested_until_the_position_is_confirmed() -> None:
    confirmation, _ = begun()
    confirmation.request(Lsn(60))
    assert confirmation.commit_requested
    await confirmation.confirm(Lsn(59))
    assert confirmation.commit_requested
    await confirmation.confirm(Lsn(60))
    assert not confirmation.commit_requested
    confirmation.request_reply(Lsn(60))
    assert not confirmation.commit_requested

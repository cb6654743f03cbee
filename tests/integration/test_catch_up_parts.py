"""What several temporary slots drain, part by part, is what one slot gives."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import pytest

from ingestd.capture.wal import backlog_parts
from ingestd.capture.wal.backlog_parts import cut
from ingestd.capture.wal.catch_up import CatchUp, CatchUpPolicy
from ingestd.capture.wal.drain_slot import Packing
from ingestd.positions import Lsn
from tests.harness.encrypted import as_if_encrypted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ingestd.changes import Chunk
    from ingestd.decode.stream import StreamDecoder
    from tests.harness.databases import Database

_PLAIN = (
    "SELECT data FROM pg_logical_slot_peek_binary_changes('{slot}', NULL, NULL,"
    " 'proto_version', '1', 'publication_names', '{slot}')"
)
_TOLD_ANEW = b"RY"
"""Every call tells of relations and types anew."""


class Messages:
    """Stands where the decoder does, and keeps what it is fed."""

    def __init__(self) -> None:
        self.found: list[bytes] = []
        self.range = Lsn(0), Lsn(0)
        self.ends: list[Lsn] = []

    def feed(
        self, buffer: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> list[Chunk]:
        self.found += [buffer[a:b] for a, b in zip(starts, ends, strict=True)]
        return []

    def idle(self, end: Lsn) -> None:
        self.ends.append(end)


def write(database: Database) -> None:
    """Make transactions that lie across each other, long ones, with rolled-back parts."""
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(database.connect(autocommit=False)) for _ in range(3)]
        for number in range(300):
            session = sessions[number % 3]
            session.execute("SAVEPOINT s")
            session.execute(
                "INSERT INTO t SELECT %s, n, repeat(md5(n::text), n) FROM generate_series(1, 20) n",
                [number],
            )
            if number % 5 == 0:
                session.execute("ROLLBACK TO s")
            if number % 3 == 1 or number % 40 == 0:  # the third session commits at the end
                session.commit()
        for session in sessions:
            session.commit()


def of_one_slot(database: Database) -> list[bytes]:
    rows = database.rows(_PLAIN.format(slot=database.name))
    return [bytes(row[0]) for row in rows if bytes(row[0][:1]) not in _TOLD_ANEW]


async def drained(database: Database, policy: CatchUpPolicy) -> Messages:
    [[start, target]] = database.rows(
        "SELECT confirmed_flush_lsn::text, pg_current_wal_flush_lsn()::text"
        " FROM pg_replication_slots WHERE slot_name = %s",
        database.name,
    )
    begin, end = Lsn.parse(start), Lsn.parse(target)
    messages = Messages()
    messages.range = begin, end
    backlog = await CatchUp.begin(database.dsn, database.name, database.name, policy, end - begin)
    try:
        async for _ in backlog.chunks(begin, end, cast("StreamDecoder", messages)):
            pass
    finally:
        await backlog.close()
    assert messages.ends[-1] == end
    return messages


@pytest.mark.parametrize(
    ("slots", "part_bytes"), [(1, 1 << 30), (1, 100_000), (2, 50_000), (3, 16_384)]
)
@pytest.mark.parametrize("packed", [None, "by_number", "by_bytes"])
async def test_exactly_once_parts_meet_whatever_lies_across_their_bounds(
    database: Database,
    slots: int,
    part_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    packed: str | None,
) -> None:
    """I2, I3: message by message what one slot gives, in the same order."""
    database.execute(
        "CREATE TABLE t (a int, b int, c text)",
        f"CREATE PUBLICATION {database.name} FOR TABLE t",
        f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')",
    )
    await asyncio.to_thread(write, database)
    if packed:
        as_if_encrypted(monkeypatch)
    packing = Packing(by_bytes=packed == "by_bytes")
    policy = CatchUpPolicy(above_bytes=0, slots=slots, part_bytes=part_bytes, packing=packing)
    messages = await drained(database, policy)
    found = [m for m in messages.found if m[:1] not in _TOLD_ANEW]
    assert found == await asyncio.to_thread(of_one_slot, database)
    assert len(found) > 1000
    if part_bytes < 1 << 20:
        assert len(messages.ends) > 2 * slots


@pytest.mark.parametrize("slots", [1, 2])
async def test_exactly_once_a_transaction_across_many_parts_has_them_joined(
    database: Database, slots: int
) -> None:
    """I2, I3: and it is not decoded for each of them from its beginning."""
    database.execute(
        "CREATE TABLE t (a int, b int, c text)",
        f"CREATE PUBLICATION {database.name} FOR TABLE t",
        f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')",
        "INSERT INTO t SELECT 1, n, '' FROM generate_series(1, 2000) n",
        "INSERT INTO t SELECT 2, n, '' FROM generate_series(1, 20000) n",
        "INSERT INTO t SELECT 3, n, '' FROM generate_series(1, 2000) n",
    )
    policy = CatchUpPolicy(above_bytes=0, slots=slots, part_bytes=50_000)
    messages = await drained(database, policy)
    found = [m for m in messages.found if m[:1] not in _TOLD_ANEW]
    assert found == await asyncio.to_thread(of_one_slot, database)
    sizes = [end - begin for begin, end in pairwise(messages.ends)]
    assert max(sizes) > 3 * 50_000
    assert len(sizes) < 25


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
async def test_exactly_once_joined_parts_end_where_they_hold_enough(
    database: Database, slots: int, monkeypatch: pytest.MonkeyPatch, *, packed: bool
) -> None:
    """I2, I3: what follows comes next, before what other slots have made meanwhile."""
    database.execute(
        "CREATE TABLE t (a int, b int, c text)",
        f"CREATE PUBLICATION {database.name} FOR TABLE t",
        f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')",
    )
    await asyncio.to_thread(write, database)
    if packed:
        as_if_encrypted(monkeypatch)
    monkeypatch.setattr(backlog_parts, "SPARSE_RATIO", 0)  # as if all before had held nothing
    policy = CatchUpPolicy(above_bytes=0, slots=slots, part_bytes=50_000)
    messages = await drained(database, policy)
    found = [m for m in messages.found if m[:1] not in _TOLD_ANEW]
    assert found == await asyncio.to_thread(of_one_slot, database)
    assert sorted(messages.ends) == messages.ends
    bounds = {part.end for part in cut(*messages.range, slots=slots, part_bytes=50_000)}
    assert len(set(messages.ends) - bounds) > 3

"""Several temporary slots drain, part by part, exactly what one slot sends."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import pytest

from ingestd.model.lsn import Lsn
from ingestd.postgres.wal.drain.backlog_parts import cut
from ingestd.postgres.wal.drain.drain import Drain, DrainPolicy, PartFailedError
from tests.harness.databases import query_server_id
from tests.harness.open_transactions import OpenWriters, meanings, segmenting

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ingestd.decode.pgoutput.decoder import PgoutputDecoder
    from ingestd.model.changes import ChangeSet
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
        self, buffer: bytes | memoryview, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> list[ChangeSet]:
        self.found += [bytes(buffer[a:b]) for a, b in zip(starts, ends, strict=True)]
        return []

    def idle(self, end: Lsn) -> None:
        self.ends.append(end)

    def of_changes(self) -> list[bytes]:
        """All but definitions, which every call repeats."""
        return of_changes(self.found)


def create(database: Database) -> None:
    """Make a table, and a publication and a slot for it."""
    database.execute(
        "CREATE TABLE t (a int, b int, c text)",
        f"CREATE PUBLICATION {database.name} FOR TABLE t",
        f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')",
    )


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


def of_changes(found: Sequence[bytes]) -> list[bytes]:
    """Leave out definitions, which every call repeats, and empty transactions, which 14 sends."""
    told = [message for message in found if message[:1] not in _TOLD_ANEW]
    empty = {i for i, (a, b) in enumerate(pairwise(told)) if (a[:1], b[:1]) == (b"B", b"C")}
    return [m for i, m in enumerate(told) if i not in empty and i - 1 not in empty]


def of_one_slot(database: Database) -> list[bytes]:
    return of_changes([bytes(row[0]) for row in database.rows(_PLAIN.format(slot=database.name))])


async def drained(database: Database, policy: DrainPolicy) -> Messages:
    [[start, target]] = database.rows(
        "SELECT confirmed_flush_lsn::text, pg_current_wal_flush_lsn()::text"
        " FROM pg_replication_slots WHERE slot_name = %s",
        database.name,
    )
    begin, end = Lsn.parse(start), Lsn.parse(target)
    messages = Messages()
    messages.range = begin, end
    queried_id = await query_server_id(database.dsn)
    name = database.name
    backlog = await Drain.start(
        database.dsn, name, name, policy, end - begin, queried_id=queried_id
    )
    try:
        async for _ in backlog.change_sets(begin, end, cast("PgoutputDecoder", messages)):
            pass
    finally:
        await backlog.close()
    assert messages.ends[-1] == end
    return messages


@pytest.mark.parametrize(
    ("slots", "part_bytes"), [(1, 1 << 30), (1, 100_000), (2, 50_000), (3, 16_384)]
)
async def test_exactly_once_at_the_bounds_of_parts(
    database: Database, slots: int, part_bytes: int
) -> None:
    """I2, I3: message by message what one slot sends, in the same order."""
    create(database)
    await asyncio.to_thread(write, database)
    policy = DrainPolicy(above_bytes=0, slots=slots, part_bytes=part_bytes)
    messages = await drained(database, policy)
    assert messages.of_changes() == await asyncio.to_thread(of_one_slot, database)
    assert len(messages.of_changes()) > 1000
    if part_bytes < 1 << 20:
        assert len(messages.ends) > 2 * slots


@pytest.mark.parametrize("slots", [1, 2])
async def test_exactly_once_a_transaction_across_parts_merges_them(
    database: Database, slots: int
) -> None:
    """I2, I3: and it is not decoded for each of them from its beginning."""
    create(database)
    database.execute(
        "INSERT INTO t SELECT 1, n, '' FROM generate_series(1, 2000) n",
        "INSERT INTO t SELECT 2, n, '' FROM generate_series(1, 20000) n",
        "INSERT INTO t SELECT 3, n, '' FROM generate_series(1, 2000) n",
    )
    policy = DrainPolicy(above_bytes=0, slots=slots, part_bytes=50_000)
    messages = await drained(database, policy)
    assert messages.of_changes() == await asyncio.to_thread(of_one_slot, database)
    sizes = [end - begin for begin, end in pairwise(messages.ends)]
    assert max(sizes) > 3 * 50_000
    assert len(sizes) < 25


@pytest.mark.thorough
@pytest.mark.parametrize("slots", [1, 2])
async def test_exactly_once_joined_parts_end_where_they_hold_enough(
    database: Database, slots: int
) -> None:
    """I2, I3: the following WAL comes next, before what other slots have decoded meanwhile."""
    create(database)
    await asyncio.to_thread(write, database)
    # As if all parts before had held nothing.
    policy = DrainPolicy(above_bytes=0, slots=slots, part_bytes=50_000, sparse_ratio=0)
    messages = await drained(database, policy)
    assert messages.of_changes() == await asyncio.to_thread(of_one_slot, database)
    assert sorted(messages.ends) == messages.ends
    bounds = {part.end for part in cut(*messages.range, slots=slots, part_bytes=50_000)}
    assert len(set(messages.ends) - bounds) > 3


@pytest.mark.thorough
@pytest.mark.parametrize(("slots", "part_bytes"), [(1, 1 << 30), (1, 100_000), (2, 50_000)])
async def test_exactly_once_segments_come_in_commit_order(
    database: Database, slots: int, part_bytes: int
) -> None:
    """I2, I3: message by message what one slot sends at commit, whatever is rolled back."""
    create(database)
    await asyncio.to_thread(write, database)
    policy = segmenting(database, slots=slots, part_bytes=part_bytes)
    messages = await drained(database, policy)
    assert messages.of_changes() == await asyncio.to_thread(of_one_slot, database)
    assert policy.segmented


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(2, 8))]
)
async def test_exactly_once_segments_with_ddl_give_the_same_rows(
    database: Database, seed: int
) -> None:
    """Definitions too: each change is decoded by the one that it was made with."""
    writers = OpenWriters(database, seed=seed, sessions=3, transactions=15, keeps_ddl=True)
    database.execute(
        f"CREATE PUBLICATION {database.name} FOR ALL TABLES",
        f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')",
    )
    with writers:
        await asyncio.to_thread(writers.join)
    plain = await drained(database, DrainPolicy(above_bytes=0, slots=1))
    policy = segmenting(database, slots=1)
    messages = await drained(database, policy)
    assert list(meanings(messages.found)) == list(meanings(plain.found))
    assert policy.segmented > 5
    assert writers.undone
    assert writers.rolled_back


@pytest.mark.thorough
@pytest.mark.parametrize(
    "setup",
    [
        "ALTER DATABASE {0} SET ingestd.commits = '5:7,'",
        "ALTER DATABASE {0} SET ingestd.streamed = '731,733'",
        "ALTER DATABASE {0} SET standard_conforming_strings = off",
        "ALTER DATABASE {0} SET enable_nestloop = off",
        "ALTER DATABASE {0} SET join_collapse_limit = 1",
        "CREATE FUNCTION public.concat(text, text) RETURNS text LANGUAGE sql AS 'SELECT $1 || $2'",
        (
            "CREATE FUNCTION public.get_byte(bytea, int) RETURNS int LANGUAGE sql AS 'SELECT 0';"
            "ALTER DATABASE {0} SET search_path = public, pg_catalog"
        ),
    ],
)
@pytest.mark.parametrize("large", [False, True])
async def test_exactly_once_whatever_is_set_in_the_database(
    database: Database, setup: str, *, large: bool
) -> None:
    """I2, I3: also where nothing needs segments."""
    create(database)
    rows = 3000 if large else 3
    for number in range(4):
        database.execute(
            f"INSERT INTO t SELECT {number}, n, md5(n::text) FROM generate_series(1, {rows}) n",
            f"INSERT INTO t VALUES ({number}, 0, 'beside')",
        )
    expected = await asyncio.to_thread(of_one_slot, database)
    policy = segmenting(database, slots=1)
    for statement in setup.format(database.name).split(";"):
        database.execute(statement)
    messages = await drained(database, policy)
    assert messages.of_changes() == expected
    assert policy.segmented == 4 * large


async def test_a_drain_does_without_segments_beyond_the_limit(database: Database) -> None:
    create(database)
    await asyncio.to_thread(write, database)
    policy = segmenting(database, slots=1, most_segmented=2)
    with pytest.raises(PartFailedError, match="more than 2"):
        await drained(database, policy)
    messages = await drained(database, policy)
    assert messages.of_changes() == await asyncio.to_thread(of_one_slot, database)
    assert not policy.segmented

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from ingestd.model.errors import TableError, TransientError
from ingestd.model.lake_state import LakeState, RegisteredTable, TableState
from ingestd.model.lsn import Lsn
from ingestd.ports import ChangeCapture, Fresh, LakeLost, Lost, Resumed, SnapshotPage, TableRead
from tests.contract.change_worlds import (
    LARGE_ROWS,
    LIMIT_S,
    ChangeWorld,
    FakeChangeWorld,
    PollingChangeWorld,
    WalChangeWorld,
    claim,
    until,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from ingestd.model.changes import ChangeSet, TableBatch
    from ingestd.model.schema import Table
    from ingestd.ports import Snapshot
    from tests.harness.databases import Database


STREAMING = ["fake", "wal", "wal catching up"]


@pytest.fixture(params=[*STREAMING, "polling"])
async def world(request: pytest.FixtureRequest) -> AsyncGenerator[ChangeWorld, None]:
    async for made in _made(request):
        yield made


@pytest.fixture(params=STREAMING)
async def stream_world(request: pytest.FixtureRequest) -> AsyncGenerator[ChangeWorld, None]:
    """A slot, which keeps every transaction until it is confirmed."""
    async for made in _made(request):
        yield made


@pytest.fixture
async def polled_world(database: Database) -> AsyncGenerator[ChangeWorld, None]:
    made = PollingChangeWorld(database)
    yield made
    await made.close()


async def _made(request: pytest.FixtureRequest) -> AsyncGenerator[ChangeWorld, None]:
    made: ChangeWorld
    if request.param == "fake":
        made = FakeChangeWorld()
    elif request.param == "polling":
        made = PollingChangeWorld(request.getfixturevalue("database"))
    else:
        catches_up = request.param == "wal catching up"
        made = WalChangeWorld(request.getfixturevalue("database"), catches_up=catches_up)
    yield made
    await made.close()


async def prepared(world: ChangeWorld) -> tuple[ChangeCapture, Sequence[Table]]:
    """A capture that may stream."""
    capture = world.capture()
    await claim(capture)
    tables = (await capture.discover({})).tables
    await capture.prepare(tables)
    return capture, tables


async def begun(world: ChangeWorld) -> tuple[ChangeCapture, Sequence[Table]]:
    """A capture that delivers all changes from now on."""
    capture, tables = await prepared(world)
    await world.begin(capture, tables)
    return capture, tables


async def take(live: AsyncGenerator[ChangeSet, None], transactions: int) -> list[ChangeSet]:
    """The change sets until so many transactions have arrived."""
    change_sets: list[ChangeSet] = []
    async with asyncio.timeout(LIMIT_S):
        while sum(c.transactions for c in change_sets) < transactions:
            change_sets.append(await anext(live))
    return change_sets


async def take_to(live: AsyncGenerator[ChangeSet, None], position: Lsn) -> list[ChangeSet]:
    """The change sets until everything below `position`, or found by a poll there, has come."""
    change_sets: list[ChangeSet] = []
    async with asyncio.timeout(LIMIT_S):
        async for change_set in live:
            change_sets.append(change_set)
            if change_set.position >= position and not change_set.ends_in_transaction:
                break
    return change_sets


def rows_of(batches: Sequence[TableBatch], table: str | None = None) -> list[dict[str, Any]]:
    return [
        row
        for batch in batches
        if table is None or batch.table.id.name == table
        for row in batch.rows.to_pylist()
    ]


async def rows_read(snapshot: Snapshot) -> list[dict[str, Any]]:
    """All rows, once it is seen that every table was read to its end."""
    items = [item async for item in snapshot.items()]
    assert any(isinstance(item, TableRead) for item in items)
    assert not any(isinstance(item, TableError) for item in items)
    return rows_of([item.batch for item in items if isinstance(item, SnapshotPage)])


def changes_of(change_sets: Sequence[ChangeSet], table: str | None = None) -> list[dict[str, Any]]:
    return rows_of([batch for change_set in change_sets for batch in change_set.batches], table)


def ids(change_sets: Sequence[ChangeSet], table: str | None = None) -> list[int]:
    return [row["id"] for row in changes_of(change_sets, table)]


def committed(tables: Sequence[Table], position: Lsn | None, server_id: str | None) -> LakeState:
    """A lake in which these tables are live."""
    registered = {
        t.id: RegisteredTable(t.id, t.oid, 1, TableState.LIVE, None, position) for t in tables
    }
    return LakeState(1, position, {}, registered, server_id)


async def assert_nothing_left(world: ChangeWorld) -> None:
    async def is_clean() -> bool:
        return not await world.leftovers()

    await until(is_clean)


# --- claim, discover, continuity, prepare ----------------------------------------------------


async def test_one_writer_the_claim_is_exclusive_until_close(world: ChangeWorld) -> None:
    first, second = world.capture(), world.capture()
    await first.claim()
    await first.claim()
    with pytest.raises(TransientError) as raised:
        await second.claim()
    assert raised.value.reason == "claimed"
    await first.close()

    await claim(second)


async def test_discover_finds_the_tables_and_changes_nothing(world: ChangeWorld) -> None:
    before = await world.state()
    capture = world.capture()
    found = await capture.discover({})
    assert [str(t.id) for t in found.tables] == ["public.a", "public.b"]
    assert [c.name for c in found.tables[0].columns] == ["id", "note"]
    assert found.tables[0].key == found.tables[0].identity == ("id",)
    assert not found.refused
    assert found.server_id
    again = await capture.discover({})
    assert again.lsn >= found.lsn  # the server writes of its own, when it prunes a catalog's pages
    assert replace(again, lsn=found.lsn) == found
    assert await world.state() == before


async def test_continuity_tells_fresh_resumed_and_lost(stream_world: ChangeWorld) -> None:
    world = stream_world
    capture = world.capture()
    await capture.claim()
    found = await capture.discover({})
    assert await capture.continuity(LakeState()) == Fresh()
    await capture.prepare(found.tables)
    start = await world.confirmed()
    assert start is not None
    lake = committed(found.tables, start, found.server_id)
    before = await world.state()
    assert await capture.continuity(lake) == Resumed()
    assert await capture.continuity(LakeState(position=start, server_id=found.server_id)) == Fresh()
    assert await capture.continuity(LakeState(server_id=found.server_id)) == Fresh()
    for older in (committed(found.tables, Lsn(start - 1), found.server_id), LakeState()):
        lost = await capture.continuity(older)
        assert isinstance(lost, LakeLost)
        assert lost.reason
    assert await world.state() == before
    await capture.close()
    await world.lose_slot()
    later = world.capture()
    verdict = await later.continuity(lake)
    assert isinstance(verdict, Lost)
    assert verdict.reason


async def test_no_position_is_above_the_servers_end(world: ChangeWorld) -> None:
    capture = world.capture()
    await capture.claim()
    found = await capture.discover({})
    await capture.prepare(found.tables)
    before, state = await world.current(), await world.state()
    for server_id in (None, found.server_id):
        end = await capture.server_end(committed(found.tables, before, server_id))
        assert before <= end.lsn <= await world.current() + (1 << 20)
        assert not end.in_recovery
    assert await world.state() == state
    await capture.close()


async def test_continuity_without_a_slot_goes_by_the_server(polled_world: ChangeWorld) -> None:
    world = polled_world
    capture = world.capture()
    await capture.claim()
    found = await capture.discover({})
    assert await capture.continuity(LakeState()) == Fresh()
    await capture.prepare(found.tables)
    position, before = await world.current(), await world.state()
    for earlier in (position, Lsn(position - 1), Lsn(1)):
        lake = committed(found.tables, earlier, found.server_id)
        assert await capture.continuity(lake) == Resumed()
    assert (
        await capture.continuity(LakeState(position=position, server_id=found.server_id)) == Fresh()
    )
    system, timeline, kind = found.server_id.split("/")
    server_ids = {
        f"{int(system) + 1}/{timeline}/{kind}": "is not the one that",
        f"{system}/{timeline}": "another kind of capture",
        f"{system}/{int(timeline) + 1}/{kind}": "promoted or restored",
    }
    for server_id, reason in server_ids.items():
        verdict = await capture.continuity(committed(found.tables, position, server_id))
        assert isinstance(verdict, Lost)
        assert reason in verdict.reason
    ahead = committed(found.tables, Lsn(position + (1 << 30)), found.server_id)
    verdict = await capture.continuity(ahead)
    assert isinstance(verdict, Lost)
    assert verdict.is_behind
    assert await world.state() == before


@pytest.mark.thorough
async def test_prepare_is_idempotent(world: ChangeWorld) -> None:
    capture, tables = await prepared(world)
    state = await world.state()
    await world.insert(1)
    await capture.prepare(tables)
    assert await world.state() == state
    await capture.close()
    again = world.capture()
    await claim(again)
    await again.discover({})
    await again.prepare(tables)
    await again.prepare(tables, renew=True)


async def test_prepare_keeps_the_position_and_renews_when_asked(
    stream_world: ChangeWorld,
) -> None:
    world = stream_world
    capture, tables = await prepared(world)
    kept = await world.confirmed()
    assert kept is not None
    await world.insert(1)
    await capture.close()
    again = world.capture()
    await claim(again)
    await again.prepare(tables)
    assert await world.confirmed() == kept
    await again.prepare(tables, renew=True)
    renewed = await world.confirmed()
    assert renewed is not None
    assert renewed > kept


# --- snapshot and stream ---------------------------------------------------------------------


async def test_snapshot_boundary_no_loss_or_duplicate_under_writes(
    world: ChangeWorld,
) -> None:
    stop = asyncio.Event()
    written: list[int] = []

    async def write() -> None:
        while not stop.is_set():
            key = len(written) + 1
            await world.insert(key, key + 1_000_000)
            written.append(key)

    async def some_more(than: int) -> None:
        async def grown() -> bool:
            return len(written) > than

        await until(grown)

    writer = asyncio.create_task(write())
    try:
        await some_more(5)
        capture, tables = await prepared(world)
        await some_more(len(written))
        snapshot = await capture.snapshot(tables)
        read = await rows_read(snapshot)
        assert datetime.now(UTC) >= snapshot.at
        await snapshot.close()
        await snapshot.close()
        async with aclosing(capture.changes(None)) as live:
            change_sets = await take_to(live, snapshot.point)
            await some_more(len(written) + 5)
            stop.set()
            await writer
            change_sets += await take_to(live, await world.current())
    finally:
        stop.set()
        await writer
    assert {(r["_cdc_op"], r["_cdc_lsn"], r["_cdc_seq"]) for r in read} == {
        ("r", snapshot.point, 0)
    }
    later = [r for r in changes_of(change_sets) if r["_cdc_lsn"] >= snapshot.point]
    assert later
    found = sorted(r["id"] for r in [*read, *later])
    assert found == await world.rows()


async def test_a_later_snapshot_has_a_point_that_live_passes(world: ChangeWorld) -> None:
    capture, tables = await prepared(world)
    await world.insert(1, 2, table="b")
    first = await capture.snapshot(tables)
    await first.close()
    await capture.close()
    capture, tables = await prepared(world)  # the slot exists: another point, not its own
    await world.insert(3, table="b")
    snapshot = await capture.snapshot([t for t in tables if t.id.name == "b"])
    read = await rows_read(snapshot)
    await snapshot.close()
    assert snapshot.point >= first.point
    assert sorted(r["id"] for r in read) == [1, 2, 3]
    await world.insert(4, table="b")
    async with aclosing(capture.changes(None)) as live:
        change_sets = await take_to(live, await world.current())
    assert [r["id"] for r in changes_of(change_sets) if r["_cdc_lsn"] >= snapshot.point] == [4]


@pytest.mark.thorough
async def test_live_gives_whole_transactions_in_commit_order(stream_world: ChangeWorld) -> None:
    world = stream_world
    capture, _ = await prepared(world)
    await world.insert(1, 2, 3)
    await world.insert(10, 20, table="b")
    await world.insert(*range(100, 100 + LARGE_ROWS), note="x" * 500)
    await world.insert(4)
    async with aclosing(capture.changes(None)) as live:
        change_sets = await take(live, 4)
    assert ids(change_sets, "a") == [1, 2, 3, *range(100, 100 + LARGE_ROWS), 4]
    assert ids(change_sets, "b") == [10, 20]
    positions = [c.position for c in change_sets]
    assert positions == sorted(positions)
    rows = changes_of(change_sets, "a")
    places = [(r["_cdc_lsn"], r["_cdc_seq"]) for r in rows]
    assert places == sorted(places)
    seqs = [r["_cdc_seq"] for r in rows]
    assert seqs == [1, 2, 3, *range(1, LARGE_ROWS + 1), 1]
    assert len({r["_cdc_xid"] for r in rows}) == 3
    assert any(c.ends_in_transaction for c in change_sets)
    for change_set in change_sets:
        last = max((r["_cdc_lsn"] for r in changes_of([change_set])), default=None)
        if last is not None:
            assert change_set.ends_in_transaction == (last >= change_set.position)
            assert change_set.first_lsn is not None
            assert change_set.first_lsn <= min(r["_cdc_lsn"] for r in changes_of([change_set]))
    times = [t for c in change_sets for t in c.commit_times.tolist()]
    assert times == sorted(times)


async def test_polls_are_whole_and_their_positions_grow(polled_world: ChangeWorld) -> None:
    """All rows of a query have one position and come in full, as the next change set shows."""
    world = polled_world
    await world.insert(7)
    capture, _ = await begun(world)
    change_sets: list[ChangeSet] = []
    async with aclosing(capture.changes(None)) as live:
        await world.insert(1, 2, 3)
        await world.insert(10, 20, table="b")
        change_sets += await take_to(live, await world.current())
        await world.insert(*range(100, 100 + LARGE_ROWS), note="x" * 500)
        change_sets += await take_to(live, await world.current())
        await world.insert(100 + LARGE_ROWS)
        change_sets += await take_to(live, await world.current())
    assert sorted(ids(change_sets, "a")) == [1, 2, 3, *range(100, 101 + LARGE_ROWS)]
    assert sorted(ids(change_sets, "b")) == [10, 20]
    positions = [c.position for c in change_sets]
    assert positions == sorted(positions)
    assert any(c.ends_in_transaction for c in change_sets)
    rows = changes_of(change_sets)
    places = [(r["_cdc_lsn"], r["_cdc_seq"]) for r in rows]
    assert places == sorted(set(places))
    for lsn in {r["_cdc_lsn"] for r in rows}:
        seqs = [r["_cdc_seq"] for r in rows if r["_cdc_lsn"] == lsn]
        assert seqs == list(range(1, len(seqs) + 1))
        tables = {c.table.id for k in change_sets for c in k.batches if lsn in _lsns(c)}
        assert len(tables) == 1
        [end] = [n for n, k in enumerate(change_sets) if any(lsn in _lsns(b) for b in k.batches)][
            -1:
        ]
        while change_sets[end].ends_in_transaction:
            end += 1
        assert lsn < change_sets[end].position
    for change_set in change_sets:
        found = [r["_cdc_lsn"] for r in changes_of([change_set])]
        assert change_set.first_lsn is None or change_set.first_lsn <= min(
            found, default=change_set.first_lsn
        )
        if change_set.ends_in_transaction:
            assert change_set.position <= min(found)
        elif found:
            assert change_set.position > max(found)
    times = [t for c in change_sets for t in c.commit_times.tolist()]
    assert times == sorted(times)
    # Where a table stands comes with the last of its rows, and never before.
    for number, change_set in enumerate(change_sets):
        for batch in change_set.batches:
            lsn = max(_lsns(batch))
            rest = [b for k in change_sets[number:] for b in k.batches if lsn in _lsns(b)]
            assert (batch.resume is not None) == (batch is rest[-1])


def _lsns(batch: TableBatch) -> set[int]:
    return set(batch.rows.column("_cdc_lsn").to_pylist())


async def test_nothing_is_given_of_a_table_before_it_was_read(polled_world: ChangeWorld) -> None:
    world = polled_world
    await world.insert(1)
    await world.insert(2, table="b")
    capture, tables = await prepared(world)
    await world.begin(capture, [t for t in tables if t.id.name == "b"])
    async with aclosing(capture.changes(None)) as live:
        await world.insert(3)
        await world.insert(4, table="b")
        change_sets = await take_to(live, await world.current())
        assert ids(change_sets) == [4]
        snapshot = await capture.snapshot([t for t in tables if t.id.name == "a"])
        await world.insert(5)
        assert sorted(r["id"] for r in await rows_read(snapshot)) == [1, 3]
        await snapshot.close()
        change_sets = await take_to(live, await world.current())
        assert ids(change_sets) == [5]
        assert changes_of(change_sets)[0]["_cdc_lsn"] > snapshot.point


async def test_no_replay_without_a_slot(polled_world: ChangeWorld) -> None:
    assert not polled_world.capture().supports_replay


async def test_supports_replay_from_any_position_not_confirmed(stream_world: ChangeWorld) -> None:
    world = stream_world
    capture, tables = await prepared(world)
    assert capture.supports_replay
    ends = []
    async with aclosing(capture.changes(None)) as live:
        for key in range(1, 6):
            await world.insert(key)
            ends.append((await take(live, 1))[-1].position)
    await capture.close()
    for done in (0, 1, 3, 4):  # where it starts is durable: it may be confirmed by that
        later = world.capture()
        await claim(later)
        await later.prepare(tables)
        async with aclosing(later.changes(ends[done - 1] if done else None)) as live:
            assert ids(await take(live, 5 - done)) == list(range(done + 1, 6))
        await later.close()


async def test_resumes_exactly_after_the_confirmed_position(stream_world: ChangeWorld) -> None:
    world = stream_world
    capture, tables = await prepared(world)
    for key in range(1, 6):
        await world.insert(key)
    async with aclosing(capture.changes(None)) as live:
        position = (await take_to(live, await world.current()))[-1].position
        await world.insert(6)
        await world.insert(7)
        await take(live, 2)
        await capture.confirm(position)

        async def is_confirmed() -> bool:
            return await world.confirmed() == position

        await until(is_confirmed)
    await capture.close()
    later = world.capture()
    await claim(later)
    await later.prepare(tables)
    async with aclosing(later.changes(None)) as live:
        assert ids(await take(live, 2)) == [6, 7]


@pytest.mark.thorough
async def test_a_reader_that_stalls_keeps_its_connection(world: ChangeWorld) -> None:
    capture, _ = await begun(world)
    await (
        world.write_elsewhere()
    )  # a catching-up capture stalls in a backlog, the others in a stream
    async with aclosing(capture.changes(None)) as live:
        first = await anext(live)
        await world.insert(*range(LARGE_ROWS), note="y" * 400)
        await world.insert(LARGE_ROWS)
        await world.outlast_patience()
        change_sets = [first, *await take_to(live, await world.current())]
        await world.insert(LARGE_ROWS + 1)
        change_sets += await take(live, 1)
    # Only now: counting so many rows would stall the loop, and what keeps the connection.
    assert ids(change_sets) == list(range(LARGE_ROWS + 2))


async def test_idle_advances_while_only_others_write(world: ChangeWorld) -> None:
    capture, _ = await begun(world)
    async with aclosing(capture.changes(None)) as live:
        await anext(live)
        await world.write_elsewhere()
        position = await world.current()
        change_sets = await take_to(live, position)
        assert not changes_of(change_sets)
        assert all(c.transactions == 0 and not c.ends_in_transaction for c in change_sets)
        await capture.confirm(change_sets[-1].position)

        async def has_advanced() -> bool:
            return (await world.confirmed() or 0) >= position

        await until(has_advanced)


# --- confirm, lag, health, close -------------------------------------------------------------


async def test_the_end_follows_all_that_was_committed(world: ChangeWorld) -> None:
    capture, _ = await begun(world)
    found: list[ChangeSet] = []

    async def read() -> None:
        async with aclosing(capture.changes(None)) as live:
            async for change_set in live:
                found.append(change_set)  # noqa: PERF401 - read meanwhile

    reading = asyncio.create_task(read())
    try:
        for number in (1, 2, 3):
            await world.insert(number)
            async with asyncio.timeout(LIMIT_S):
                end = await capture.end_position()
                while not found or found[-1].position < end or found[-1].ends_in_transaction:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert ids(found) == list(range(1, number + 1))
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_confirm_is_cumulative_and_never_beyond_what_was_read(
    world: ChangeWorld,
) -> None:
    capture, _ = await begun(world)
    await world.insert(1)
    async with aclosing(capture.changes(None)) as live:
        early = (await take(live, 1))[-1].position
        await world.insert(2)
        late = (await take(live, 1))[-1].position
        with pytest.raises(ValueError, match="delivered"):
            await capture.confirm(Lsn(late + 1_000_000_000))
        await capture.confirm(late)
        await capture.confirm(late)
        await capture.confirm(early)

        async def is_confirmed() -> bool:
            return await world.confirmed() == late

        await until(is_confirmed)
        await capture.confirm(early)
        assert await world.confirmed() == late


async def test_lag_is_measured_from_what_is_confirmed(world: ChangeWorld) -> None:
    capture, _ = await begun(world)
    async with aclosing(capture.changes(None)) as live:
        await take_to(live, await world.current())
        await world.insert(1000)  # so that a stream has begun, which reports it at once
        done = (await take(live, 1))[-1].position
        await capture.confirm(done)

        async def is_confirmed() -> bool:
            return await world.confirmed() == done

        await until(is_confirmed)
        await world.insert(*range(1000), note="z" * 400)
        now = await world.current()
        async with asyncio.timeout(LIMIT_S):
            lag = await capture.lag()
    assert lag.current_lsn >= now
    assert lag.confirmed_lsn == done
    assert lag.lag_bytes is not None
    assert lag.lag_bytes >= now - done > 0


async def test_lag_is_measured_while_no_change_sets_are_taken(stream_world: ChangeWorld) -> None:
    world = stream_world
    capture, _ = await prepared(world)
    async with aclosing(capture.changes(None)) as live:
        await anext(live)
        confirmed = await world.confirmed()
        await world.insert(*range(LARGE_ROWS), note="z" * 400)
        now = await world.current()
        async with asyncio.timeout(LIMIT_S):
            lag = await capture.lag()
        assert confirmed is not None
        assert lag.current_lsn >= now
        assert lag.confirmed_lsn == confirmed
        assert lag.lag_bytes is not None
        assert lag.lag_bytes >= now - confirmed > 0
        assert lag.retained_bytes is not None
        assert lag.retained_bytes >= lag.lag_bytes


async def test_health_tells_when_the_claim_is_lost(world: ChangeWorld) -> None:
    capture, _ = await prepared(world)
    await capture.health()
    await world.kill_claim()

    async def is_noticed() -> bool:
        try:
            await capture.health()
        except TransientError:
            return True
        return False

    await until(is_noticed)
    with pytest.raises(TransientError):
        await capture.health()
    with pytest.raises(TransientError):
        await anext(capture.changes(None))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "stage", ["new", "claimed", "prepared", "reading", "abandoned", "streaming", "killed"]
)
async def test_close_leaves_nothing_whenever_it_comes(world: ChangeWorld, stage: str) -> None:
    capture = world.capture()
    if stage == "claimed":
        await capture.claim()
    elif stage != "new":
        await world.insert(*range(2000), note="x" * 100)
        capture, tables = await prepared(world)
        if stage in {"reading", "abandoned"}:
            snapshot = await capture.snapshot(tables)
            items = snapshot.items()
            await anext(items)
            if stage == "reading":
                await items.aclose()
                await snapshot.close()
        elif stage == "streaming":
            await world.begin(capture, tables)
            await world.insert(5000)
            live = capture.changes(None)
            await take(live, 1)
        elif stage == "killed":
            await world.kill_claim()
    if stage == "abandoned":
        await items.aclose()
    await capture.close()
    await capture.close()
    if stage == "abandoned":
        await snapshot.close()
    await assert_nothing_left(world)


# --- connector and factory -------------------------------------------------------------------


class AnotherKind(BaseModel):
    kind: str = "another"


async def test_a_factory_refuses_unknown_keys_and_other_kinds(world: ChangeWorld) -> None:
    factory = world.factory()
    config = world.config()
    assert isinstance(config, factory.config_model)
    assert config.model_dump()["kind"] == factory.name
    with pytest.raises(ValueError, match="bogus"):
        factory.config_model.model_validate({**config.model_dump(), "bogus": 1})
    with pytest.raises(TypeError, match="AnotherKind"):
        factory.create("shop", AnotherKind(), memory_bytes=1 << 20)


async def test_a_connector_gives_what_it_says_and_closes_twice(world: ChangeWorld) -> None:
    connector = world.factory().create("shop", world.config(), memory_bytes=1 << 24)
    lines = await connector.check()
    assert lines
    assert {line.source for line in lines} == {"shop"}
    assert all(line.level != "fail" for line in lines)
    capture = connector.capture()
    assert (await capture.discover({})).tables
    await capture.close()
    assert isinstance(await connector.metadata().schemas(), list)
    await connector.close()
    await connector.close()
    await assert_nothing_left(world)


# --- tables that come while it streams ---------------------------------------------------------


async def test_tables_changed_tells_of_a_new_table_and_of_nothing_else(world: ChangeWorld) -> None:
    capture = world.capture()
    await capture.claim()
    before = (await capture.discover({})).tables
    change = asyncio.create_task(capture.tables_changed())
    await world.insert(1, 2)
    await world.write_elsewhere()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await asyncio.shield(change)
    await world.add_table()
    async with asyncio.timeout(LIMIT_S):
        await change
    after = (await capture.discover({})).tables
    assert {t.id.name for t in after} - {t.id.name for t in before} == {"new1"}


async def test_tables_changed_can_be_cancelled_at_any_time(world: ChangeWorld) -> None:
    capture = world.capture()
    await capture.claim()
    await capture.discover({})
    for _ in range(5):
        change = asyncio.create_task(capture.tables_changed())
        await asyncio.wait([change], timeout=0.05)
        change.cancel()
        await asyncio.gather(change, return_exceptions=True)
    await capture.health()
    assert (await capture.discover({})).tables


@pytest.mark.thorough
async def test_snapshot_boundary_of_a_table_added_while_streaming(world: ChangeWorld) -> None:
    """I6: what is read at the point, and what the stream brings from there on, is the table."""
    capture, tables = await prepared(world)
    await world.begin(capture, tables)
    change_sets: list[ChangeSet] = []
    streaming = asyncio.create_task(_collect(capture, change_sets))
    await world.insert(1)
    await world.add_table()
    await world.insert(*range(100), table="new1")
    writing = asyncio.create_task(_keep_writing(world))
    tables = (await capture.discover({})).tables
    await capture.prepare(tables)
    new = [t for t in tables if t.id.name == "new1"]
    snapshot = await capture.snapshot(new)
    read = [row["id"] for row in await rows_read(snapshot)]
    point = snapshot.point
    await snapshot.close()
    await writing
    end = await world.current()
    await world.write_elsewhere()
    await until(lambda: _reached(change_sets, end))
    streaming.cancel()
    await asyncio.gather(streaming, return_exceptions=True)
    streamed = [row["id"] for row in changes_of(change_sets, "new1") if row["_cdc_lsn"] >= point]
    assert sorted(read + streamed) == await world.rows("new1")
    assert set(range(100)) <= set(read)
    assert sorted(ids(change_sets, "a")) == await world.rows("a")


async def test_idle_advances_past_a_snapshot_that_was_read(world: ChangeWorld) -> None:
    capture, tables = await begun(world)
    snapshot = await capture.snapshot(tables)
    async with aclosing(capture.changes(None)) as live:
        before = (await take_to(live, snapshot.point))[-1].position
        await snapshot.advance_source()
        change_sets = await take_to(live, Lsn(before + 1))
    await snapshot.close()
    assert not changes_of(change_sets)


async def _collect(capture: ChangeCapture, into: list[ChangeSet]) -> None:
    async with aclosing(capture.changes(None)) as live:
        while True:
            into.append(await anext(live))


async def _keep_writing(world: ChangeWorld) -> None:
    for key in range(100, 160):
        await world.insert(key, table="new1")
        await world.insert(key)


async def _reached(change_sets: Sequence[ChangeSet], position: Lsn) -> bool:
    return any(change_set.position >= position for change_set in change_sets)

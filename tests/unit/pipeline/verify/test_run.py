"""The course of a verification: waiting for the lake, settling where no position is exact."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ingestd.digests.row_digests import ComparedColumn
from ingestd.lake.fold.plain import fold_rows
from ingestd.lake.verify.change_digests import digest_changes
from ingestd.model.errors import IngestdError, OperatorError, TableChangedError, TransientError
from ingestd.model.lsn import Lsn
from ingestd.pipeline.verify.run import PollingTolerance, Verification, rest_between
from ingestd.pipeline.verify.table import VerifySettings
from ingestd.ports import Split
from ingestd.ports.verify import KEY, Digested, Kind, VerifyOutcome, VerifyPoint, VerifyState
from ingestd.terminal.verify import Untold
from tests.unit.lake.rows import make_batch, make_table

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence

    import pyarrow as pa

    from ingestd.model.lake_state import RegisteredTable
    from ingestd.model.schema import Table, TableId
    from ingestd.ports.verify import Matrix, ValueRows, VerifiedSource

TABLE = make_table("orders")
ONE, TWO, OTHER = {"id": 1, "note": "a"}, {"id": 2, "note": "b"}, {"id": 2, "note": "c"}


def rows(*given: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**row, "_cdc_lsn": 5, "_cdc_seq": n} for n, row in enumerate(given, 1)]


class Source:
    """In memory; each read returns the next rows, and the last ones stay."""

    def __init__(self, *looks: Sequence[dict[str, Any]], is_exact: bool = True) -> None:
        self._looks = list(looks)
        self._is_exact = is_exact
        self.fault: TableChangedError | None = None
        self.looked = 0

    @property
    def point(self) -> VerifyPoint:
        return VerifyPoint(Lsn(10), is_exact=self._is_exact)

    @asynccontextmanager
    async def open(self, tables: Sequence[Table]) -> AsyncIterator[VerifiedSource]:
        assert tables
        self.looked += 1
        yield self

    async def splits(self, table: Table) -> Sequence[Split]:
        return [Split(table, "", "", 10)]

    async def batches(self, split: Split) -> AsyncGenerator[pa.RecordBatch, None]:
        look = self._looks[min(self.looked, len(self._looks)) - 1]
        yield make_batch(split.table, rows(*look)).rows

    async def ensure_unreplaced(self, table: Table) -> None:
        assert table is TABLE
        if self.fault is not None:
            raise self.fault


class Lake:
    """In memory, at these positions, one after the other."""

    def __init__(self, *changes: dict[str, Any], positions: Sequence[int | None] = (10,)) -> None:
        self._changes = rows(*changes)
        self._positions = list(positions)

    async def known(self) -> dict[TableId, RegisteredTable]:
        return {}

    async def position(self) -> Lsn | None:
        at = self._positions.pop(0) if len(self._positions) > 1 else self._positions[0]
        return None if at is None else Lsn(at)

    async def describe(self, table: Table) -> Digested:
        columns = tuple(ComparedColumn(c.name, (c.name,), c.type) for c in table.columns)
        return Digested(table, columns, (0,))

    async def survey(
        self, described: Digested, point: VerifyPoint, *, most_linked: int
    ) -> Digested:
        assert point.lsn == 10
        assert most_linked > 0
        return described

    async def changes(self, digested: Digested) -> AsyncGenerator[Matrix, None]:
        yield digest_changes(make_batch(TABLE, self._changes).rows, digested)

    async def rows_of(self, digested: Digested, keys: Collection[int]) -> ValueRows:
        assert keys
        batch = make_batch(digested.table, self._changes).rows
        return fold_rows(batch.to_pylist(), ["id", "note"], ["id"])

    async def ensure_unchanged(self, table: Table) -> None:
        assert table is TABLE

    async def close(self) -> None:
        """Release nothing."""


def verification(
    source: Source,
    lake: Lake,
    *,
    wait_s: float = 0.3,
    looks: dict[TableId, PollingTolerance] | None = None,
    **fields: Any,
) -> Verification:
    """A verification with `fields` of VerifySettings."""
    settings = replace(VerifySettings(1 << 20, wait_s=wait_s), **fields)
    return Verification("source shop", source.open, lake, settings, Untold(), polling=looks or {})


async def verified(
    source: Source,
    lake: Lake,
    *,
    wait_s: float = 0.3,
    looks: dict[TableId, PollingTolerance] | None = None,
    **fields: Any,
) -> VerifyOutcome:
    one = verification(source, lake, wait_s=wait_s, looks=looks, **fields)
    [outcome] = await one.run([TABLE])
    return outcome


async def test_it_waits_for_the_lake() -> None:
    lake = Lake(ONE, TWO, positions=(None, 9, 10))
    outcome = await verified(Source([ONE, TWO]), lake, wait_s=30)
    assert (outcome.state, outcome.source_rows) == (VerifyState.EQUAL, 2)


@pytest.mark.parametrize(
    ("positions", "told"),
    [((None,), "did not move meanwhile"), ((7,), "is the daemon running"), ((7, 8), "it was at")],
)
async def test_a_lake_that_does_not_reach_the_position_is_reported(
    positions: Sequence[int | None], told: str
) -> None:
    outcome = await verified(Source([ONE]), Lake(ONE, positions=positions))
    assert outcome.state is VerifyState.NOT_REACHED
    assert isinstance(outcome.fault, TransientError)
    assert outcome.fault.reason == "lake_behind"
    assert told in str(outcome.fault)


class Fault(Source):
    """Fails at the table of this name, each time from the second one."""

    def __init__(self, name: str, fault: IngestdError, *looks: Sequence[dict[str, Any]]) -> None:
        super().__init__(*looks)
        self._name = name
        self._fault = fault

    async def splits(self, table: Table) -> Sequence[Split]:
        if table.id.name == self._name:
            raise self._fault
        return await super().splits(table)

    async def ensure_unreplaced(self, table: Table) -> None:
        pass


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        (TransientError("cut off", reason="connection_lost"), VerifyState.NOT_REACHED),
        (OperatorError("no room"), VerifyState.NOT_COMPARED),
    ],
)
async def test_a_fault_leaves_what_was_found_before(
    fault: IngestdError, state: VerifyState
) -> None:
    tables = [make_table(name) for name in ("a", "b", "c", "d")]
    source = Fault("b", fault, [ONE])
    outcomes = await verification(source, Lake(ONE)).run(tables)
    assert [o.state for o in outcomes] == [VerifyState.EQUAL, state, state, state]
    assert [o.fault for o in outcomes] == [None, fault, None, None]
    assert outcomes[2].note == outcomes[3].note == "the verification ended at table public.b"


async def test_a_fault_before_anything_was_begun_is_raised() -> None:
    fault = TransientError("refused", reason="unreachable")

    @asynccontextmanager
    async def closed(tables: Sequence[Table]) -> AsyncIterator[VerifiedSource]:
        raise fault
        yield Source(tables)

    one = Verification(
        "source shop", closed, Lake(ONE), VerifySettings(1 << 20), Untold(), polling={}
    )
    with pytest.raises(TransientError, match="refused"):
        await one.run([TABLE])


class Linked(Lake):
    """All of whose rows are linked, as far as it knows."""

    async def survey(
        self, described: Digested, point: VerifyPoint, *, most_linked: int
    ) -> Digested:
        described = await super().survey(described, point, most_linked=most_linked)
        matrices = [m async for m in self.changes(described)]
        return replace(described, linked=np.unique(matrices[0][:, KEY]))


async def test_more_linked_changes_than_memory_holds_are_refused() -> None:
    changes = [{"id": 1, "note": str(n)} for n in range(10)]
    outcome = await verified(Source(changes[-1:]), Linked(*changes))
    assert outcome.state is VerifyState.EQUAL
    outcome = await verified(
        Source(changes[-1:]), Linked(*changes), memory_bytes=1000, least_linked_bytes=0
    )
    assert outcome.state is VerifyState.NOT_COMPARED
    assert outcome.fault is not None
    assert outcome.fault.remedy == "ingestd verify ... --memory 1MB"


def test_looks_at_the_lake_become_rarer() -> None:
    rests = [0.125]
    for _ in range(6):
        rests.append(rest_between(rests[-1], took_s=0.01))
    assert rests == [0.125, 0.25, 0.5, 1.0, 2.0, 2.0, 2.0]
    assert rest_between(2.0, took_s=1.5) == 13.5  # most of the time nothing is asked


async def test_every_kind_of_difference_is_named() -> None:
    three = {"id": 3, "note": "d"}
    outcome = await verified(Source([ONE, TWO]), Lake(OTHER, three, ONE | {"_cdc_op": "d"}))
    assert outcome.state is VerifyState.DIFFERENT
    assert [(str(d.kind), dict(d.key), d.columns) for d in outcome.differences] == [
        ("different", {"id": "2"}, ("note",)),
        ("extra", {"id": "3"}, ()),
        ("missing", {"id": "1"}, ()),
    ]
    assert all(not d.source and not d.lake for d in outcome.differences)


async def test_a_table_that_changes_meanwhile_is_not_compared() -> None:
    source = Source([ONE])
    source.fault = TableChangedError(TABLE.id, "was truncated")
    outcome = await verified(source, Lake(ONE))
    assert (outcome.state, outcome.fault) == (VerifyState.NOT_COMPARED, source.fault)


async def test_without_an_exact_position_a_passing_row_is_equal() -> None:
    source = Source([ONE, OTHER], [ONE, TWO], is_exact=False)
    outcome = await verified(source, Lake(ONE, TWO), wait_s=30)
    assert (outcome.state, source.looked) == (VerifyState.EQUAL, 2)


async def test_without_an_exact_position_varying_differences_are_equal() -> None:
    source = Source([ONE, OTHER], [ONE | {"note": "z"}, TWO], is_exact=False)
    outcome = await verified(source, Lake(ONE, TWO), wait_s=30)
    assert (outcome.state, source.looked) == (VerifyState.EQUAL, 2)


async def test_more_differences_than_are_kept_are_not_reached() -> None:
    """Other ones in each look: a daemon that is some seconds behind a busy table."""
    quick: dict[str, Any] = {"wait_s": 2.0, "first_rest_s": 0.02}
    looks = [[{"id": n, "note": f"{look}"} for n in range(1, 5)] for look in range(20)]
    lake = Lake(*looks[0])
    outcome = await verified(Source(*looks[1:], is_exact=False), lake, tracked=2, **quick)
    assert isinstance(outcome.fault, TransientError)
    assert (outcome.state, outcome.fault.reason) == (VerifyState.NOT_REACHED, "not_settled")
    # those of them that stay are reported
    looks = [[{"id": 0, "note": "z"}, *rows] for rows in looks]
    outcome = await verified(Source(*looks[1:], is_exact=False), lake, tracked=4, **quick)
    assert outcome.state is VerifyState.DIFFERENT
    assert outcome.counts == {Kind.MISSING: 1}


async def test_what_was_kept_of_too_many_differences_hides_none() -> None:
    """One that stays may not be among those that are kept, for one look."""
    late = [{"id": n, "note": "late"} for n in range(3, 9)]
    source = Source([ONE, OTHER], [*late, ONE, OTHER], [ONE, OTHER], is_exact=False)
    outcome = await verified(source, Lake(ONE, TWO), wait_s=2, first_rest_s=0.02, tracked=1)
    assert outcome.state is VerifyState.DIFFERENT


async def test_without_an_exact_position_what_stays_to_the_end_is_one() -> None:
    source = Source([ONE, OTHER], is_exact=False)
    outcome = await verified(source, Lake(ONE, TWO))
    assert (outcome.state, source.looked > 1) == (VerifyState.DIFFERENT, True)
    assert outcome.counts == {Kind.DIFFERENT: 1}


@pytest.mark.parametrize(
    ("sweep_s", "state"),
    [(None, VerifyState.EQUAL), (600.0, VerifyState.NOT_REACHED), (0.01, VerifyState.DIFFERENT)],
)
async def test_rows_that_only_the_lake_has_wait_for_a_sweep(
    sweep_s: float | None, state: VerifyState
) -> None:
    source = Source([ONE], is_exact=False)
    outcome = await verified(
        source, Lake(ONE, TWO), looks={TABLE.id: PollingTolerance(0.0, sweep_s)}
    )
    assert outcome.state is state
    assert (source.looked == 1) == (sweep_s is None)  # nothing to wait for
    assert (outcome.note is not None) == (sweep_s is None)


@pytest.mark.parametrize(
    ("poll_s", "state"), [(600.0, VerifyState.NOT_REACHED), (0.01, VerifyState.DIFFERENT)]
)
async def test_rows_that_differ_wait_for_a_poll_of_a_quiet_table(
    poll_s: float, state: VerifyState
) -> None:
    """The lake moves on by polls of other tables."""
    source = Source([ONE, TWO], is_exact=False)
    outcome = await verified(source, Lake(ONE), looks={TABLE.id: PollingTolerance(poll_s, None)})
    assert outcome.state is state
    if outcome.fault is not None:
        assert "--wait 1200s" in str(outcome.fault)


async def test_a_lake_moved_by_infrequent_polls_is_not_taken_for_stuck() -> None:
    looks = {TABLE.id: PollingTolerance(100.0, None)}
    outcome = await verified(Source([ONE]), Lake(ONE, positions=(7,)), looks=looks)
    assert outcome.fault is not None
    assert "quiet tables are polled every 100 s: --wait 200s" in str(outcome.fault)


async def test_a_look_that_ends_late_is_the_last() -> None:
    """Each may take long: the lake has to come to where the source was."""
    source = Source([ONE, TWO], is_exact=False)
    lake = Lake(ONE, positions=(7, 7, 10) * 4)
    outcome = await verified(source, lake, wait_s=1.2, first_rest_s=0.02)
    assert (outcome.state, source.looked) == (VerifyState.DIFFERENT, 2)


async def test_of_more_differences_than_are_kept_it_is_said() -> None:
    outcome = await verified(Source([ONE, TWO], is_exact=False), Lake(), tracked=1)
    assert (outcome.state, outcome.counts) == (VerifyState.DIFFERENT, {Kind.MISSING: 1})
    assert outcome.note is not None
    assert "more differ" in outcome.note


async def test_rows_a_sweep_may_find_are_counted_apart() -> None:
    source = Source([ONE], is_exact=False)
    lake = Lake(ONE | {"note": "z"}, TWO)
    outcome = await verified(source, lake, looks={TABLE.id: PollingTolerance(0.0, 600.0)})
    assert (outcome.state, outcome.counts) == (VerifyState.DIFFERENT, {Kind.DIFFERENT: 1})
    assert outcome.note is not None
    assert "1 more rows may have been deleted" in outcome.note

"""How a verification goes on: waiting for the lake, settling where no position is exact."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.errors import TableChangedError, TransientError
from ingestd.ports import Split
from ingestd.positions import Lsn
from ingestd.row_digests import ComparedColumn
from ingestd.run.table_verification import VerifySettings
from ingestd.run.verifying import Verification
from ingestd.sink.change_digests import digest_changes
from ingestd.sink.fold import fold_rows
from ingestd.verification import Digested, Kind, Outcome, Point, State
from ingestd.verify_display import Untold
from tests.unit.sink.rows import make_batch, make_table

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence

    import pyarrow as pa

    from ingestd.schema import Table, TableId
    from ingestd.verification import Matrix, Rows, VerifiedSource

TABLE = make_table("orders")
ONE, TWO, OTHER = {"id": 1, "note": "a"}, {"id": 2, "note": "b"}, {"id": 2, "note": "c"}


def rows(*given: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**row, "_cdc_lsn": 5, "_cdc_seq": n} for n, row in enumerate(given, 1)]


class Source:
    """In memory; each look at it is of the next rows, and the last ones stay."""

    def __init__(self, *looks: Sequence[dict[str, Any]], is_exact: bool = True) -> None:
        self._looks = list(looks)
        self._is_exact = is_exact
        self.fault: TableChangedError | None = None
        self.looked = 0

    @property
    def point(self) -> Point:
        return Point(Lsn(10), is_exact=self._is_exact)

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

    async def position(self) -> Lsn | None:
        at = self._positions.pop(0) if len(self._positions) > 1 else self._positions[0]
        return None if at is None else Lsn(at)

    async def describe(self, table: Table) -> Digested:
        columns = tuple(ComparedColumn(c.name, (c.name,), c.type) for c in table.columns)
        return Digested(table, columns, (0,))

    async def survey(self, described: Digested, point: Point) -> Digested:
        assert point.lsn == 10
        return described

    async def changes(self, digested: Digested) -> AsyncGenerator[Matrix, None]:
        yield digest_changes(make_batch(TABLE, self._changes).rows, digested)

    async def rows_of(self, digested: Digested, keys: Collection[int]) -> Rows:
        assert keys
        batch = make_batch(digested.table, self._changes).rows
        return fold_rows(batch.to_pylist(), ["id", "note"], ["id"])

    async def ensure_whole(self, table: Table) -> None:
        assert table is TABLE


async def verified(
    source: Source,
    lake: Lake,
    *,
    wait_s: float = 0.3,
    sweeps_s: dict[TableId, float | None] | None = None,
) -> Outcome:
    settings = VerifySettings(1 << 20, wait_s=wait_s)
    verification = Verification(
        "source shop", source.open, lake, settings, Untold(), sweeps_s=sweeps_s or {}
    )
    [outcome] = await verification.run([TABLE])
    return outcome


async def test_it_waits_for_the_lake() -> None:
    lake = Lake(ONE, TWO, positions=(None, 9, 10))
    outcome = await verified(Source([ONE, TWO]), lake, wait_s=30)
    assert (outcome.state, outcome.source_rows) == (State.EQUAL, 2)


@pytest.mark.parametrize(
    ("positions", "told"),
    [((None,), "did not move meanwhile"), ((7,), "is the daemon running"), ((7, 8), "it was at")],
)
async def test_a_lake_that_does_not_get_there_is_told(
    positions: Sequence[int | None], told: str
) -> None:
    with pytest.raises(TransientError, match=told) as found:
        await verified(Source([ONE]), Lake(ONE, positions=positions))
    assert found.value.reason == "lake_behind"


async def test_every_kind_of_difference_is_named() -> None:
    three = {"id": 3, "note": "d"}
    outcome = await verified(Source([ONE, TWO]), Lake(OTHER, three, ONE | {"_cdc_op": "d"}))
    assert outcome.state is State.DIFFERENT
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
    assert (outcome.state, outcome.fault) == (State.NOT_COMPARED, source.fault)


async def test_without_an_exact_position_what_goes_away_is_no_difference() -> None:
    source = Source([ONE, OTHER], [ONE, TWO], is_exact=False)
    outcome = await verified(source, Lake(ONE, TWO), wait_s=30)
    assert (outcome.state, source.looked) == (State.EQUAL, 2)


async def test_without_an_exact_position_other_differences_each_time_are_none() -> None:
    source = Source([ONE, OTHER], [ONE | {"note": "z"}, TWO], is_exact=False)
    outcome = await verified(source, Lake(ONE, TWO), wait_s=30)
    assert (outcome.state, source.looked) == (State.EQUAL, 2)


async def test_without_an_exact_position_what_stays_to_the_end_is_one() -> None:
    source = Source([ONE, OTHER], is_exact=False)
    outcome = await verified(source, Lake(ONE, TWO))
    assert (outcome.state, source.looked > 1) == (State.DIFFERENT, True)
    assert outcome.counts == {Kind.DIFFERENT: 1}


@pytest.mark.parametrize(
    ("sweep_s", "state"),
    [(None, State.EQUAL), (600.0, State.NOT_REACHED), (0.01, State.DIFFERENT)],
)
async def test_rows_that_only_the_lake_has_wait_for_a_sweep(
    sweep_s: float | None, state: State
) -> None:
    source = Source([ONE], is_exact=False)
    outcome = await verified(source, Lake(ONE, TWO), sweeps_s={TABLE.id: sweep_s})
    assert outcome.state is state
    assert (source.looked == 1) == (sweep_s is None)  # nothing to wait for
    assert (outcome.note is not None) == (sweep_s is None)

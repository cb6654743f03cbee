"""Batches read ahead by a thread."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence

import pyarrow as pa
import pytest

from ingestd.model.predicates import Predicate
from spark_jobs.source.split_batches import BATCHES_AHEAD, batches_of


def batch(n: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": [n]})


class Source:
    """Gives numbers, and an error after them; knows how far it was read."""

    def __init__(self, numbers: Sequence[int], error: Exception | None = None) -> None:
        self._numbers = numbers
        self._error = error
        self.given = 0
        self.is_closed = False

    @property
    def remaining(self) -> Sequence[Predicate]:
        return ()

    async def batches(self) -> AsyncIterator[pa.RecordBatch]:
        for n in self._numbers:
            self.given += 1
            yield batch(n)
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        self.is_closed = True


def readers() -> int:
    return sum(thread.name == "ingestd-read" for thread in threading.enumerate())


def test_sources_follow_one_another_and_are_closed() -> None:
    sources = [Source([1, 2]), Source([]), Source([3])]
    found = [b.column(0)[0].as_py() for b in batches_of(lambda: iter(sources))]
    assert found == [1, 2, 3]
    assert all(source.is_closed for source in sources)
    assert readers() == 0


def test_an_error_comes_after_what_was_read() -> None:
    source = Source([1], ValueError("no"))
    found: Iterator[pa.RecordBatch] = batches_of(lambda: iter([source]))
    assert next(found).num_rows == 1
    with pytest.raises(ValueError, match="no"):
        next(found)
    assert source.is_closed
    assert readers() == 0


def test_who_stops_early_stops_the_reading() -> None:
    source = Source(range(1000))
    found = batches_of(lambda: iter([source]))
    next(found)
    found.close()
    assert source.is_closed
    assert source.given <= BATCHES_AHEAD + 3
    assert readers() == 0

"""The model of snapshots during a stream, searched completely. `pytest -s` shows the result."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from tests.unit.protocol.checker import CounterExampleError, Explored, explore
from tests.unit.protocol.snapshots import Broken, Source, World

CHANGES = (("put", 0), ("put", 1), ("delete", 0))
AGAIN = Source(CHANGES)
MISSED = Source(CHANGES, gaps=1, asks=0)
OFTEN = Source(CHANGES, kills=2, gaps=1)


def search(source: Source) -> Explored[World]:
    return explore(source.start(), source.steps, source.fault_of, source.is_done)


@pytest.mark.parametrize(
    ("source", "least"),
    [
        pytest.param(AGAIN, 4_000, id="read again"),
        pytest.param(MISSED, 1_000, id="changes missed"),
        pytest.param(OFTEN, 10_000, id="often", marks=pytest.mark.long),
    ],
)
def test_snapshot_boundary_every_state_equals_its_position(source: Source, least: int) -> None:
    """I6; while a table is read again its old rows serve."""
    found = search(source)
    sys.stdout.write(f"{found}\n")
    assert found.states >= least


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (Broken.GATE, AGAIN),
        (Broken.MARKER, MISSED),
        (Broken.MARKER_LAST, AGAIN),
        (Broken.LIVE_WHEN_DURABLE, AGAIN),
        (Broken.LIVE_WHEN_WHOLE, AGAIN),
        (Broken.ALL_CHANGES_MEANWHILE, AGAIN),
    ],
    ids=lambda value: value.name if isinstance(value, Broken) else "",
)
def test_the_search_finds_a_fault_without_each_rule(rule: Broken, source: Source) -> None:
    with pytest.raises(CounterExampleError, match="I6: the lake has") as caught:
        search(replace(source, broken=frozenset({rule})))
    sys.stdout.write(f"without {rule.name}: {caught.value}\n")

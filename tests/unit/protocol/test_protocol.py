"""The protocol's model, searched completely (docs/protocol.md). `pytest -s` shows the result."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import pytest

from tests.unit.protocol.checker import CounterExampleError, Explored, explore
from tests.unit.protocol.properties import fault_of
from tests.unit.protocol.protocol import Broken, Protocol, World

BOTH, ONE, OTHER, NEITHER = (1, 2), (1,), (2,), ()
SHORT = Protocol((BOTH, OTHER, ONE))
ALONE = Protocol((BOTH, OTHER, NEITHER, ONE))
TOGETHER = Protocol((ONE, OTHER), daemons=2)
"""The second transaction has another table than the first: compare-and-swap is per table."""
NEW = replace(TOGETHER, exist=False)
"""The raw tables are not there yet, so that they can't be fenced."""
PAUSED = replace(TOGETHER, one_by_one=False)
"""All sessions of a daemon end at once, or none."""


def search(protocol: Protocol) -> Explored[World]:
    judge = partial(fault_of, protocol)
    return explore(protocol.start(), protocol.steps, judge, protocol.is_done)


@pytest.mark.parametrize(
    ("protocol", "least"),
    [
        pytest.param(ALONE, 5_000, id="one daemon"),
        pytest.param(TOGETHER, 15_000, id="two daemons", marks=pytest.mark.slow),
        pytest.param(NEW, 25_000, id="two daemons, new tables", marks=pytest.mark.slow),
        pytest.param(
            replace(ALONE, faults=2, exist=False), 80_000, id="2 faults", marks=pytest.mark.long
        ),
        pytest.param(
            replace(PAUSED, faults=2), 300_000, id="two daemons, 2 faults", marks=pytest.mark.long
        ),
    ],
)
def test_every_state_keeps_the_invariants_and_can_reach_the_end(
    protocol: Protocol, least: int
) -> None:
    """I1 to I5, for any order of the steps, and faults at any of them."""
    found = search(protocol)
    sys.stdout.write(f"{found}\n")
    assert found.states >= least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "protocol", "fault"),
    [
        (Broken.CONFIRM_DURABLE_ONLY, SHORT, "I1: 1 is confirmed, 0 is durable"),
        (Broken.REPLAY_FROM_THE_LAKE, SHORT, "I2: epoch 2 is 0 to 1, the one before ends at 1"),
        (Broken.SKIP_BELOW_WATERMARK, SHORT, "I3: table . has a row twice"),
        (Broken.SKIP_BELOW_ONLY, SHORT, "I3: table . lacks"),
        (Broken.SKIP_COMPARES_POSITIONS, SHORT, "I3: table . lacks"),
        (Broken.LIST_HALF_EPOCH, SHORT, "I4: table . has rows .* its version does not hold"),
        (Broken.FLOOR, SHORT, "I[24]: "),
        (Broken.WHOLE_TRANSACTIONS, SHORT, "I3: table . lacks"),
        (Broken.TABLES_BEFORE_EPOCH, SHORT, "I3: table . lacks"),
        (Broken.COMPARE_AND_SWAP, PAUSED, "I3: table . has a row twice"),
        (Broken.FENCE, PAUSED, "I2: table . has rows of epoch 1 .* which ends at 1"),
        (Broken.VOUCH, NEW, "I2: table . has rows of epoch 1 .* which ends at 1"),
        (Broken.FENCE_BEFORE_CONTINUITY, TOGETHER, "beyond the lake, and nothing was lost"),
        (Broken.CLAIM, TOGETHER, "beyond the lake, and nothing was lost"),
    ],
    ids=lambda value: value.name if isinstance(value, Broken) else "",
)
def test_the_search_finds_a_fault_without_each_rule(
    rule: Broken, protocol: Protocol, fault: str
) -> None:
    with pytest.raises(CounterExampleError, match=fault) as caught:
        search(replace(protocol, broken=frozenset({rule})))
    sys.stdout.write(f"without {rule.name}: {caught.value}\n")
    assert "claims the source" in " ".join(caught.value.trace)


def test_no_rule_is_left_untried() -> None:
    [tried] = [
        mark.args[1]
        for mark in test_the_search_finds_a_fault_without_each_rule.pytestmark  # type: ignore[attr-defined]
        if mark.name == "parametrize"
    ]
    assert {rule for rule, _, _ in tried} == set(Broken)

"""A history that differs, made as small as it can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.histories.life import Outcome
    from tests.histories.steps import History

    Play = Callable[[Sequence[History]], Sequence[Outcome]]

ROUNDS = 5
MOST = 24
"""Candidates in a life."""
SMALL = 6
"""Steps of which pairs are left out."""


def shrink(history: History, play: Play, rounds: int = ROUNDS) -> Outcome | None:
    """Leave out steps while it still differs. None if it does not when played alone.

    `play` plays candidates side by side, so that a round takes one life of the daemon: all that
    lack one step, and all that lack one part of several.
    """
    [best] = play([history])
    if not best.faults:
        return None
    for _ in range(rounds):
        candidates = _smaller(best.history)
        if not candidates:
            break
        failing = [o for o in play(candidates) if o.faults]
        if not failing:
            break
        best = min(failing, key=lambda o: len(o.history))
    return best


def _smaller(history: History) -> list[History]:
    """Return it without each step, and without each half, quarter and eighth of them."""
    size = len(history)
    parts: set[tuple[int, ...]] = {(n,) for n in range(size)}
    for pieces in (2, 4, 8):
        width = -(-size // pieces)
        if width > 1:
            parts |= {tuple(range(n, min(size, n + width))) for n in range(0, size, width)}
    # What is left out by pairs: BEGIN and COMMIT, SAVEPOINT and RELEASE, a DDL and its undoing.
    parts |= {(n, m) for n in range(size) for m in range(n + 1, size) if size <= SMALL}
    chosen = sorted(parts, key=lambda part: (-len(part), part))[:MOST]
    return [history.without(part) for part in chosen]

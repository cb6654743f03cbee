"""An exhaustive search of a small model: every state that steps can lead to, breadth first.

Breadth first, so that the trace to a counter-example is as short as any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)

Steps = Callable[[S], Iterable[tuple[str, S]]]
"""What can happen in a state: the step's name, and the state after it."""
Judge = Callable[[S], str | None]
"""What is wrong with a state, None if nothing is."""


class CounterExampleError(AssertionError):
    """A state that must not be, and the steps that lead there."""

    def __init__(self, fault: str, trace: list[str]) -> None:
        super().__init__("\n".join([fault, *(f"  {n}. {s}" for n, s in enumerate(trace, 1))]))
        self.fault = fault
        self.trace = trace


@dataclass(frozen=True)
class Explored(Generic[S]):
    """All that was found: how many states and steps, and how long the longest shortest way is."""

    states: int
    steps: int
    depth: int


def explore(
    start: S, steps: Steps[S], judge: Judge[S], is_goal: Callable[[S], bool]
) -> Explored[S]:
    """Visit every state. Raises CounterExampleError.

    Each has to be as `judge` wants, and a state that `is_goal` takes has to be within its reach.
    """
    came_from: dict[S, tuple[S, str] | None] = {start: None}
    before: dict[S, list[S]] = {}
    depth = {start: 0}
    todo = deque([start])
    count = 0
    while todo:
        state = todo.popleft()
        fault = judge(state)
        if fault is not None:
            raise CounterExampleError(fault, _trace(came_from, state))
        for name, after in steps(state):
            count += 1
            before.setdefault(after, []).append(state)
            if after not in came_from:
                came_from[after] = (state, name)
                depth[after] = depth[state] + 1
                todo.append(after)
    stuck = came_from.keys() - _leading_to([s for s in came_from if is_goal(s)], before)
    if stuck:
        nearest = min(stuck, key=depth.__getitem__)
        raise CounterExampleError("from here the goal is out of reach", _trace(came_from, nearest))
    return Explored(len(came_from), count, max(depth.values()))


def _leading_to(goals: list[S], before: dict[S, list[S]]) -> set[S]:
    found = set(goals)
    todo = list(goals)
    while todo:
        for state in before.get(todo.pop(), ()):
            if state not in found:
                found.add(state)
                todo.append(state)
    return found


def _trace(came_from: dict[S, tuple[S, str] | None], state: S) -> list[str]:
    names = []
    way = came_from[state]
    while way is not None:
        state, name = way
        names.append(name)
        way = came_from[state]
    return names[::-1]

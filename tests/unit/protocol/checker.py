"""An exhaustive search of a small model: every state that steps can lead to, breadth first.

Breadth first, so that the trace to a counter-example is as short as any.
"""

from __future__ import annotations

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
    states = [start]
    numbers = {start: 0}
    came_from: list[tuple[int, str] | None] = [None]
    before: list[list[int]] = [[]]
    depth = [0]
    count = 0
    for number, state in enumerate(states):  # which grows
        fault = judge(state)
        if fault is not None:
            raise CounterExampleError(fault, _trace(came_from, number))
        for name, after in steps(state):
            count += 1
            found = numbers.setdefault(after, len(states))
            if found == len(states):
                states.append(after)
                came_from.append((number, name))
                before.append([])
                depth.append(depth[number] + 1)
            before[found].append(number)
    leading = _leading_to([n for n, state in enumerate(states) if is_goal(state)], before)
    stuck = set(range(len(states))) - leading
    if stuck:
        nearest = min(stuck, key=depth.__getitem__)
        raise CounterExampleError("from here the goal is out of reach", _trace(came_from, nearest))
    return Explored(len(states), count, depth[-1])


def _leading_to(goals: list[int], before: list[list[int]]) -> set[int]:
    found = set(goals)
    todo = list(goals)
    while todo:
        for number in before[todo.pop()]:
            if number not in found:
                found.add(number)
                todo.append(number)
    return found


def _trace(came_from: list[tuple[int, str] | None], number: int) -> list[str]:
    names = []
    way = came_from[number]
    while way is not None:
        number, name = way
        names.append(name)
        way = came_from[number]
    return names[::-1]

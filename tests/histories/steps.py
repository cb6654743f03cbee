"""What a history is made of, and how it is written as SQL that can be pasted."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Weather = Literal["up", "checked", "killed", "stopped"]
"""How the daemon is while a phase is played: it runs; it runs, and checks the catalog when the
phase is over; it was killed; it was stopped. It is started again after the last two."""


@dataclass(frozen=True, slots=True)
class SessionStatement:
    """A statement that a session executes. `{h}` in it stands for the history's own prefix."""

    session: str
    sql: str


Phase = tuple[SessionStatement, ...]


@dataclass(frozen=True, slots=True)
class History:
    """What is done to the tables of one prefix.

    `create`: in a transaction each, before the daemon is started the first time. `is_read_again`:
    whether a table has to be read again; None where that is not asked. `least`: the oldest server
    it is for. `logged`: what the log has to have in `v` of the rows inserted into `{h}_t`, which is
    dropped in the end.
    """

    name: str
    create: tuple[str, ...]
    phases: tuple[Phase, ...]
    is_read_again: bool | None = None
    least: int = 14
    logged: tuple[str, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.phases))

    def without(self, left_out: Iterable[int]) -> History:
        """Return it without some of its steps, which are counted over all phases."""
        out, number, phases = set(left_out), 0, []
        for phase in self.phases:
            kept = [s for n, s in enumerate(phase, start=number) if n not in out]
            number += len(phase)
            phases.append(tuple(kept))
        return replace(self, phases=tuple(phases))

    def text(self, weather: Sequence[Weather]) -> str:
        """Write it as SQL. A comment names the session where it is another than before."""
        lines = [f"-- {self.name}", *(f"{sql};" for sql in self.create), "-- the daemon is live"]
        for phase, found in zip(self.phases, weather, strict=True):
            lines += [f"-- the daemon is {found}" if found in DOWN else "-- the daemon runs"]
            lines += list(_lines(phase))
            lines += ["-- the daemon is started"] if found in DOWN else []
            lines += ["-- it checks the catalog"] if found == "checked" else []
        return "\n".join(lines).replace("{h}", "h")


DOWN: tuple[Weather, ...] = ("killed", "stopped")


def _lines(phase: Phase) -> Iterator[str]:
    last = ""
    for step in phase:
        if step.session != last:
            yield f"-- session {step.session}"
            last = step.session
        yield f"{step.sql};"


def script(text: str, session: str = "a") -> Phase:
    """Read steps of one session: statements that end with a semicolon at a line's end.

    A line `-- session NAME` switches to another session.
    """
    steps: list[SessionStatement] = []
    for part in re.split(r";[ \t]*(?:\n|$)", text):
        lines = part.strip().splitlines()
        while lines and lines[0].strip().startswith("-- session "):
            session = lines.pop(0).split()[-1]
        if lines:
            steps.append(SessionStatement(session, "\n".join(line.strip() for line in lines)))
    return tuple(steps)

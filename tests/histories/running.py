"""Many random histories, life after life: counts, and what differed as small as it can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.histories.life import Outcome, Setting, play
from tests.histories.making import make_history, make_weather
from tests.histories.shrink import shrink
from tests.histories.worlds import WORLDS, World

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.histories.steps import History, Weather

SEEDS_APART = 100_003
SCHEMAS_EVERY = 4
"""Each fourth life has a publication of schemas, which is not the daemon's."""

FULL_EVERY = 3
"""Each third life keeps whole old rows."""


@dataclass
class Run:
    """Plays lives generated from one seed, and counts them.

    `told`: of each history that differed, the smallest form, and how to play its life again.
    """

    server: PostgresServer
    seed: int
    ddl_log: str = "catalog"
    side_by_side: int = 40
    shrinks: bool = True
    found: Path | None = None
    worlds: Sequence[World] = WORLDS
    played: int = 0
    stopped: int = 0
    different: int = 0
    steps: int = 0
    refused: int = 0
    read_again: int = 0
    unsound: int = 0
    told: list[str] = field(default_factory=list)

    def life(self, number: int) -> list[Outcome]:
        """Play a life; return the outcomes of those that differed."""
        seed = self.seed * SEEDS_APART + number
        weather = make_weather(seed)
        by_schema = number % SCHEMAS_EVERY == SCHEMAS_EVERY - 1 and self.server.major >= 15
        before = "full" if number % FULL_EVERY == FULL_EVERY - 1 else "key"
        setting = Setting(manage=not by_schema, ddl_log=self.ddl_log, before=before)
        histories = [
            make_history(
                f"history {n} of life {number}", seed * 1009 + n, len(weather), self.worlds
            )
            for n in range(self.side_by_side)
        ]
        outcomes = play(self.server, histories, weather, setting, seed)
        self._count(outcomes)
        failed = [o for o in outcomes if o.faults]
        for outcome in failed:
            self._tell(outcome, weather, setting, number)
        return failed

    def _count(self, outcomes: Sequence[Outcome]) -> None:
        self.played += len(outcomes)
        self.stopped += sum(o.is_stopped for o in outcomes)
        self.steps += sum(o.steps for o in outcomes)
        self.refused += sum(len(o.refused) for o in outcomes)
        self.read_again += sum(any(v.markers > 1 for v in o.verdicts) for o in outcomes)
        self.unsound += sum(any(v.unsound for v in o.verdicts) for o in outcomes)
        self.different += sum(bool(o.faults) for o in outcomes)

    def counts(self) -> str:
        """Say how many there were of what."""
        return (
            f"{self.played} histories, {self.different} differ, {self.stopped} stopped,"
            f" {self.read_again} with a table read again, {self.unsound} with an unsound log,"
            f" {self.steps} steps,"
            f" {self.refused} refused"
        )

    def _tell(
        self, outcome: Outcome, weather: Sequence[Weather], setting: Setting, number: int
    ) -> None:
        """Say what differed, in its smallest form."""

        def again(histories: Sequence[History]) -> Sequence[Outcome]:
            return play(self.server, histories, weather, setting, number)

        small = shrink(outcome.history, again) if self.shrinks else None
        told = small or outcome
        where = f"--seed {self.seed} --first {number} --lives 1"
        where += f" --side-by-side {self.side_by_side} --server {self.server.major}"
        lines = [f"-- {where}, {setting}"]
        if self.shrinks and small is None:
            lines.append("-- only in the company of the others of its life")
        lines += [told.history.text(weather), *(f"-- {fault}" for fault in told.faults)]
        lines += [f"-- {u}" for v in told.verdicts for u in v.unsound[:2] if v.is_lost]
        lines += [f"-- refused: {text}" for text in told.refused]
        text = "\n".join(line[:600] for line in "\n".join(lines).splitlines())
        self.told.append(text)
        if self.found is not None:
            with self.found.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n\n")

"""`ingestd drop`: drops the slot and the publication of a source."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from ingestd.app.factories import lake_of
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.slots.drop import claimed_belongings
from ingestd.terminal.echo import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingestd.config import Config
    from ingestd.postgres.wal.slots.drop import Belonging

EXIT_DECLINED = 1


@dataclass(frozen=True, slots=True)
class DropCommand:
    """Drops what source `source` of `config` has on its server. The source must exist."""

    config: Config
    source: str

    def do(self, *, is_agreed: bool) -> int:
        """Print what will be dropped, ask unless `is_agreed`, drop it; return the exit code.

        Raises OperatorError while a daemon works on the source; IngestdError.
        """
        settings = self.config.sources[self.source]
        if not isinstance(settings, WalSettings):
            echo(f"source {self.source} is polled: it has no slot or publication to drop")
            self._report_lake()
            return 0
        place, found = asyncio.run(self._find_belongings(settings))
        goes = [b for b in found if b.kept is None]
        self._print_plan(place, found, settings)
        if not goes:
            return 0
        if not is_agreed and not typer.confirm("Drop this?", default=False):
            echo("nothing was dropped")
            return EXIT_DECLINED
        for belonging in asyncio.run(self._drop(settings)):
            echo(f"dropped {belonging.kind} {belonging.name}")
        return 0

    async def _find_belongings(self, settings: WalSettings) -> tuple[str, Sequence[Belonging]]:
        async with claimed_belongings(self.source, settings) as belongings:
            return belongings.place, await belongings.found()

    async def _drop(self, settings: WalSettings) -> list[Belonging]:
        async with claimed_belongings(self.source, settings) as belongings:
            goes = [b for b in await belongings.found() if b.kept is None]
            for belonging in goes:
                await belongings.drop(belonging)
            return goes

    def _print_plan(self, place: str, found: Sequence[Belonging], settings: WalSettings) -> None:
        echo(f"source {self.source}, on {place}:")
        for belonging in found:
            named = f"{belonging.kind} {belonging.name} ({belonging.detail})"
            if belonging.kept is None:
                echo(f"  drop {named}")
            else:
                echo(f"  keep {named}: {belonging.kept}")
                echo(f"    {belonging.statement}")
        if not found:
            echo("  there is no slot or publication to drop")
        self._report_lake()
        if any(b.kept is None for b in found):
            after = (
                "re-creates both, and re-snapshots all tables"
                if settings.slot_lost == "resnapshot"
                else 'stops because of slot_lost = "stop": the lake would have a gap'
            )
            echo(f"`ingestd run` with this config {after}.")

    def _report_lake(self) -> None:
        place = lake_of(self.config).place(self.source)
        echo(f"  the lake is not changed: {place}")

"""`ingestd drop`: drops the slot and the publication of a source."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from ingestd.app.factories import lake_of
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.slots.drop import claimed_objects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingestd.config import Config
    from ingestd.postgres.wal.slots.drop import SourceObject

EXIT_DECLINED = 1


@dataclass(frozen=True, slots=True)
class DropCommand:
    """Drops the slot and the publication of `source`, a source of `config`."""

    config: Config
    source: str

    def do(self, *, is_agreed: bool) -> int:
        """Print what will be dropped, ask unless `is_agreed`, drop it; return the exit code.

        Raises OperatorError while a daemon works on the source; IngestdError.
        """
        settings = self.config.sources[self.source]
        if not isinstance(settings, WalSettings):
            typer.echo(f"source {self.source} is polled: it has no slot or publication to drop")
            self._print_lake()
            return 0
        server, objects = asyncio.run(self._find_objects(settings))
        self._print_plan(server, objects, settings)
        if not any(each.is_dropped for each in objects):
            return 0
        if not is_agreed and not typer.confirm("Drop this?", default=False):
            typer.echo("nothing was dropped")
            return EXIT_DECLINED
        for dropped in asyncio.run(self._drop(settings)):
            typer.echo(f"dropped {dropped.kind} {dropped.name}")
        return 0

    async def _find_objects(self, settings: WalSettings) -> tuple[str, Sequence[SourceObject]]:
        """Return the server's name, and what the source has there."""
        async with claimed_objects(self.source, settings) as objects:
            return objects.server, await objects.find()

    async def _drop(self, settings: WalSettings) -> list[SourceObject]:
        """Drop what may be dropped now, which may have changed since it was printed; return it."""
        async with claimed_objects(self.source, settings) as objects:
            dropped = [each for each in await objects.find() if each.is_dropped]
            for each in dropped:
                await objects.drop(each)
            return dropped

    def _print_plan(
        self, server: str, objects: Sequence[SourceObject], settings: WalSettings
    ) -> None:
        typer.echo(f"source {self.source}, on {server}:")
        for each in objects:
            text = f"{each.kind} {each.name} ({each.detail})"
            if each.is_dropped:
                typer.echo(f"  drop {text}")
            else:
                typer.echo(f"  keep {text}: {each.why_kept}")
                typer.echo(f"    {each.statement}")
        if not objects:
            typer.echo("  there is no slot or publication to drop")
        self._print_lake()
        if any(each.is_dropped for each in objects):
            typer.echo(f"`ingestd run` with this config {_next_run(settings)}.")

    def _print_lake(self) -> None:
        place = lake_of(self.config).place(self.source)
        typer.echo(f"  the lake is not changed: {place}")


def _next_run(settings: WalSettings) -> str:
    """Return what the daemon does if it is started after the drop."""
    if settings.slot_lost == "resnapshot":
        return "re-creates both, and re-snapshots all tables"
    return 'stops because of slot_lost = "stop": the lake would have a gap'

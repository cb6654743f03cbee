"""Reading the config again while the daemon runs, on SIGHUP.

=====================================  =========================================================
what differs                           what is done
=====================================  =========================================================
`[log]`                                holds at once
a source's own section, `[epoch]`,     that source is stopped in order, as by SIGTERM, and begun
`[maintenance]`                        again with the new settings; of the last two every source
a source that is new                   is begun; the others too if their memory becomes less
a source that is not there any more    is stopped in order; slot, publication and tables stay
`[lake]`, `[limits]`, `[http]`         named in the log as needing a restart; the old ones hold
the file is refused                    nothing; the log says what is wrong, by key
=====================================  =========================================================

A source of which nothing differs is not touched. Exactly once needs nothing of its own here: a
source that is begun again goes on where the lake ends, as after any stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from ingestd.config import Config
from ingestd.model.errors import ConfigError, IngestdError
from ingestd.model.memory_shares import source_bytes
from ingestd.pipeline.supervisor import Supervisor

FIXED = ("lake", "limits", "http")
"""Sections that hold until the daemon ends."""


class SourceFactory(Protocol):
    """What the composition root does for a reload."""

    def log(self, config: Config) -> None:
        """Have the log as the config says, without any of its secrets."""
        ...

    def source(self, config: Config, name: str) -> None:
        """Build a source and run it."""
        ...

    def forget(self, name: str) -> None:
        """Show nothing of a source any more."""
        ...


@dataclass(frozen=True, slots=True)
class ConfigChanges:
    """`config`: what holds from now on. `fixed`: keys that differ and wait for a restart."""

    config: Config
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    fixed: tuple[str, ...]


def changes(running: Config, wanted: Config, shares: Mapping[str, int]) -> ConfigChanges:
    """Compare; `shares`: the bytes of memory that each source runs with."""
    fixed = tuple(
        f"{section}.{key}"
        for section in FIXED
        for key in type(getattr(wanted, section)).model_fields
        if getattr(getattr(wanted, section), key) != getattr(getattr(running, section), key)
    )
    kept = {section: getattr(running, section) for section in FIXED}
    config = wanted.model_copy(update=kept)
    is_all = (wanted.epoch, wanted.maintenance) != (running.epoch, running.maintenance)
    share = source_bytes(config.limits.memory, len(config.sources))
    changed = tuple(
        name
        for name, settings in config.sources.items()
        if name in running.sources
        and (is_all or settings != running.sources[name] or share < shares[name])
    )
    return ConfigChanges(
        config,
        added=tuple(n for n in config.sources if n not in running.sources),
        removed=tuple(n for n in running.sources if n not in config.sources),
        changed=changed,
        fixed=fixed,
    )


@dataclass
class ConfigReload:
    """Reads the config each time it is asked to. `load`: raises ConfigError."""

    config: Config
    load: Callable[[], Config]
    begin: SourceFactory
    supervisor: Supervisor
    began: Callable[[], None]
    ended: Callable[[], None]
    _shares: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        """Take what runs already."""
        self._shares = dict.fromkeys(
            self.config.sources, source_bytes(self.config.limits.memory, len(self.config.sources))
        )

    async def run(self, asked: asyncio.Event) -> None:
        """Reload whenever `asked` is set, until cancelled."""
        while True:
            await asked.wait()
            asked.clear()
            self.began()
            try:
                error = await self._tried()
            finally:
                self.ended()
            if error is not None:
                structlog.get_logger("ingestd").error(
                    "config.failed",
                    remedy="start the daemon anew, and report this",
                    exc_info=error,
                )

    async def _tried(self) -> Exception | None:
        try:
            await self.reload()
        except Exception as error:  # noqa: BLE001 - the sources go on, and the next SIGHUP counts
            return error
        return None

    async def reload(self) -> None:
        """Do what is told above; faults are logged."""
        log = structlog.get_logger("ingestd")
        wanted = self._wanted()
        if isinstance(wanted, ConfigError):
            log.error(
                "config.refused",
                problems=wanted.what.splitlines(),
                remedy="mend the file and send SIGHUP again; what was there before holds",
            )
            return
        found = changes(self.config, wanted, self._shares)
        self.begin.log(wanted)
        self.config = found.config
        log.info(
            "config.reloaded",
            added=found.added,
            removed=found.removed,
            changed=found.changed,
        )
        if found.fixed:
            log.warning(
                "config.needs_restart",
                keys=found.fixed,
                remedy="what was there before holds until the daemon is started anew",
            )
        await self._apply(found)
        try:
            await self.supervisor.look()
        except IngestdError as error:
            log.warning("config.pause_unknown", reason=error.what, remedy=error.remedy)

    def _wanted(self) -> Config | ConfigError:
        try:
            return self.load()
        except ConfigError as error:
            return error

    async def _apply(self, found: ConfigChanges) -> None:
        async with asyncio.TaskGroup() as group:
            for name in found.changed:
                group.create_task(self._replace(name, found.config))
            for name in found.removed:
                group.create_task(self._remove(name))
        for name in found.added:  # after those that may have had the same slot
            self._begin(name, found.config)

    async def _replace(self, name: str, config: Config) -> None:
        await self.supervisor.end(name)
        self._begin(name, config)

    async def _remove(self, name: str) -> None:
        await self.supervisor.end(name)
        del self._shares[name]
        self.begin.forget(name)
        structlog.get_logger("ingestd").warning(
            "source.removed",
            source=name,
            reason="it is not in the config any more; its slot stays, and keeps WAL",
            remedy="if it is not to come back, drop its slot and publication in the source",
        )

    def _begin(self, name: str, config: Config) -> None:
        self._shares[name] = source_bytes(config.limits.memory, len(config.sources))
        self.begin.source(config, name)

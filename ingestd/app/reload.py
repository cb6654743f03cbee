"""Reload of the config on SIGHUP while the daemon runs.

=====================================  =========================================================
difference                             effect
=====================================  =========================================================
`[log]`                                applies immediately
a source's section                     the source restarts with the new settings, after an orderly
                                       stop as on SIGTERM
`[epoch]`, `[maintenance]`             every source restarts likewise
a new source                           starts; the others restart if their memory share shrinks
a removed source                       stops in order; slot, publication and tables stay
`[lake]`, `[limits]`, `[http]`,        logged as needing a restart; the old values stay in effect
`[catalog]`
an invalid file                        none; the problems are logged by key
=====================================  =========================================================

Sources without a difference are not touched. Exactly-once delivery needs no extra step here: a
restarted source continues where the lake ends, as after any stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from ingestd.config import Config, Section
from ingestd.model.errors import ConfigError, IngestdError
from ingestd.model.memory_shares import source_bytes
from ingestd.pipeline.supervisor import Supervisor

FIXED = ("lake", "limits", "http", "catalog")
"""Sections that change only with a restart of the daemon."""


class SourceFactory(Protocol):
    """What a reload needs of the composition root."""

    def log(self, config: Config) -> None:
        """Configure logging from the config, and redact its secrets."""
        ...

    def source(self, config: Config, name: str) -> None:
        """Build a source and run it."""
        ...

    def drop_source(self, name: str) -> None:
        """Remove a source from the status and the metrics."""
        ...


@dataclass(frozen=True, slots=True)
class ConfigChanges:
    """`config`: in effect from now on. `fixed`: changed keys that need a restart."""

    config: Config
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    fixed: tuple[str, ...]


def changes(running: Config, wanted: Config, shares: Mapping[str, int]) -> ConfigChanges:
    """Compare two configs; `shares`: by source, its current share of memory in bytes."""
    fixed = tuple(
        key
        for section in FIXED
        for key in _changed_keys(section, getattr(running, section), getattr(wanted, section))
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


def _changed_keys(section: str, was: Section | None, now: Section | None) -> list[str]:
    """Return the keys of a section that differ; the section itself if one config lacks it."""
    if was is None or now is None:
        return [section] if was is not now else []
    names = type(now).model_fields
    return [f"{section}.{name}" for name in names if getattr(was, name) != getattr(now, name)]


@dataclass
class ConfigReload:
    """Reloads the config on request. `load`: reads the file; raises ConfigError."""

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
                    remedy="restart the daemon, and report this",
                    exc_info=error,
                )

    async def _tried(self) -> Exception | None:
        try:
            await self.reload()
        except Exception as error:  # noqa: BLE001 - the sources continue, and SIGHUP still works
            return error
        return None

    async def reload(self) -> None:
        """Re-read the config and apply the differences; errors are logged."""
        log = structlog.get_logger("ingestd")
        wanted = self._wanted()
        if isinstance(wanted, ConfigError):
            log.error(
                "config.refused",
                problems=wanted.what.splitlines(),
                remedy="fix the file and send SIGHUP again; the old config stays in effect",
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
                remedy="the old values stay in effect until the daemon is restarted",
            )
        await self._apply(found)
        try:
            await self.supervisor.check_pause_marks()
        except IngestdError as error:
            log.warning("config.pause_unknown", reason=error.what, remedy=error.remedy)

    def _wanted(self) -> Config | ConfigError:
        try:
            return self.load()
        except ConfigError as error:
            return error

    async def _apply(self, changes: ConfigChanges) -> None:
        async with asyncio.TaskGroup() as group:
            for name in changes.changed:
                group.create_task(self._replace(name, changes.config))
            for name in changes.removed:
                group.create_task(self._remove(name))
        for name in changes.added:  # after the stops, which may free the same slot
            self._begin(name, changes.config)

    async def _replace(self, name: str, config: Config) -> None:
        await self.supervisor.stop_source(name)
        self._begin(name, config)

    async def _remove(self, name: str) -> None:
        await self.supervisor.stop_source(name)
        del self._shares[name]
        self.begin.drop_source(name)
        structlog.get_logger("ingestd").warning(
            "source.removed",
            source=name,
            reason="it was removed from the config; its slot still exists and retains WAL",
            remedy="if the removal is final, drop its slot and publication in the database",
        )

    def _begin(self, name: str, config: Config) -> None:
        self._shares[name] = source_bytes(config.limits.memory, len(config.sources))
        self.begin.source(config, name)

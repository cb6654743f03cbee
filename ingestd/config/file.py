"""The complete config file: parsed, checked, its secrets collected."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, PrivateAttr, SecretStr, ValidationError

from ingestd.config.base import Section
from ingestd.config.daemon import (
    CatalogSettings,
    EpochSettings,
    HttpSettings,
    LakeSettings,
    LimitSettings,
    LogSettings,
    MaintenanceSettings,
)
from ingestd.config.errors import Problem, describe, problems_of
from ingestd.config.interpolation import Interpolator, KeyPath
from ingestd.config.redaction import Redactor, secrets_in_environment
from ingestd.config.sources import SourceSettings
from ingestd.model.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_SOURCE_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,54}\Z")
_SECRET_OPTION = re.compile(r"key|secret|token|password|credential|sas|account", re.IGNORECASE)
_REVEALING_LENGTH = 8
"""Shorter values (a region, 'true') are not secrets on their own."""


class Config(Section):
    """The complete config file, checked. `redactor` knows every secret in it."""

    lake: LakeSettings
    """Where the tables are stored."""
    epoch: EpochSettings = EpochSettings()
    """When an epoch is closed."""
    limits: LimitSettings = LimitSettings()
    """Limits of the process."""
    maintenance: MaintenanceSettings = MaintenanceSettings()
    """Maintenance of the lake, alongside the epochs (docs/maintenance.md)."""
    catalog: CatalogSettings | None = None
    """A catalog in which the lake's tables have names (docs/catalogs.md)."""
    http: HttpSettings = HttpSettings()
    """The HTTP endpoints, and who may access them."""
    log: LogSettings = LogSettings()
    """What is logged, and in which format."""
    sources: dict[str, SourceSettings] = Field(min_length=1)
    """The databases: one section each, by name."""
    _redactor: Redactor = PrivateAttr(default_factory=Redactor)

    @property
    def redactor(self) -> Redactor:
        """Removes this config's secrets from any text."""
        return self._redactor


def load_config(
    path: Path, sources: Mapping[str, type[SourceSettings]], environ: Mapping[str, str]
) -> Config:
    """Read and check a config file. `sources`: the settings model of each `kind`.

    Raises ConfigError with all faults found, one per line. Each line begins with the key's path and
    contains no secret.
    """
    document = _read(path)
    resolver = Interpolator(path.parent, environ)
    resolved = resolver.resolve(document)
    if not isinstance(resolved, dict):
        raise TypeError(resolved)
    problems = [Problem(at, why) for at, why in resolver.errors.items()]
    found = _sources(resolved.pop("sources", {}), sources, problems)
    problems += _shared(found)
    config: Config | None = None
    # a placeholder avoids reporting "no sources" when the sources are only invalid
    stand_in = SourceSettings(kind="", dsn=SecretStr("-"), tables=["-.-"])
    try:
        config = Config.model_validate({**resolved, "sources": found or {"-": stand_in}})
    except ValidationError as error:
        problems += problems_of(error, Config, (), document)
    if problems or config is None:
        raise ConfigError("\n".join(describe(problems, document, resolver)))
    _hide(config, resolver, environ)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        msg = f"{path}: the config file can't be read: {error.strerror}"
        raise ConfigError(msg, remedy="`ingestd init` creates one") from error
    except OSError as error:
        msg = f"{path}: the config file can't be read: {error.strerror}"
        raise ConfigError(msg) from error
    except UnicodeDecodeError as error:
        msg = f"{path}: not UTF-8 text"
        raise ConfigError(msg) from error
    except tomllib.TOMLDecodeError as error:
        msg = f"{path}: not TOML: {error}"
        raise ConfigError(msg) from error


def _sources(
    sections: object, kinds: Mapping[str, type[SourceSettings]], problems: list[Problem]
) -> dict[str, SourceSettings]:
    if not isinstance(sections, dict) or not sections:
        problems.append(Problem(("sources",), "none configured; add a section [sources.NAME]"))
        return {}
    found: dict[str, SourceSettings] = {}
    for name, section in sections.items():
        at: KeyPath = ("sources", name)
        if not _SOURCE_NAME.match(name):
            why = "a source's name is 1-55 of a-z, 0-9 and _, and begins with a letter or digit"
            problems.append(Problem(at, why))
        elif not isinstance(section, dict):
            problems.append(Problem(at, "must be a section [sources.NAME]"))
        elif (model := kinds.get(str(section.get("kind", "")))) is None:
            available = ", ".join(repr(kind) for kind in sorted(kinds))
            what = "unknown or not available" if "kind" in section else "is missing"
            problems.append(Problem((*at, "kind"), f"{what}; available: {available}"))
        else:
            try:
                found[name] = model.model_validate({**model.defaults(name), **section})
            except ValidationError as error:
                problems += problems_of(error, model, at, section)
    return found


def _shared(sources: Mapping[str, SourceSettings]) -> list[Problem]:
    problems = []
    owners: dict[object, str] = {}
    for name, settings in sources.items():
        claim = settings.exclusive()
        if claim is not None and (owner := owners.setdefault(claim, name)) != name:
            why = f"the same as in sources.{owner}, on the same database"
            problems.append(Problem(("sources", name, claim[0]), why))
    return problems


def _hide(config: Config, resolver: Interpolator, environ: Mapping[str, str]) -> None:
    """Mask referenced values in reprs, and pass every secret to the redactor."""
    known = [secret for source in config.sources.values() for secret in source.secrets()]
    known += secrets_in_environment(environ)
    if config.http.token is not None:
        known.append(config.http.token.get_secret_value())
    for name, option in config.lake.storage_options.items():
        value = option.get_secret_value()
        # a region or "true" is not a secret; masking it would mask half of every log line
        if _SECRET_OPTION.search(name) or len(value) >= _REVEALING_LENGTH:
            known.append(value)
    for at, value in resolver.values.items():
        section, name = _field_at(config, at)
        section._hidden.add(name)  # noqa: SLF001 - a Section's own, as this module's
        is_free_text = type(section).model_fields[name].annotation is str
        if is_free_text and len(value) >= _REVEALING_LENGTH:
            known.append(value)
    config._redactor = Redactor(known)  # noqa: SLF001


def _field_at(config: Config, at: KeyPath) -> tuple[Section, str]:
    """Return the innermost section on the path to a key, and the name of its field there."""
    section: Section = config
    name = str(at[0])
    held: Any = config
    for part in at:
        if isinstance(held, Section):
            section, name = held, str(part)
            held = getattr(held, name)
        elif isinstance(held, dict | list):
            held = held[part]  # type: ignore[index] # a key path that was validated
    return section, name

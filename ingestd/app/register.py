"""`ingestd register`: names for the lake's tables in the catalog of the config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ingestd.app.factories import lake_of, require_source
from ingestd.catalogs.kinds import open_schema
from ingestd.catalogs.names import NameReport, is_same_location, register_all
from ingestd.config import CatalogSettings, Config
from ingestd.model.check import CheckLine
from ingestd.model.errors import ConfigError, IngestdError
from ingestd.ports import LakeFactory

EPOCHS = "_epochs"
"""A table that every source has, by its name in the catalog and in the lake."""


def register(config: Config, sources: Sequence[str]) -> Iterator[NameReport]:
    """Name the tables of these sources, by default of all; yield each outcome.

    Raises ConfigError without `[catalog]`, OperatorError and TransientError if the lake or the
    catalog can't be used.
    """
    if config.catalog is None:
        raise ConfigError(
            "catalog: the config has no [catalog] section",
            remedy='[catalog]\nkind = "unity"\nuri = "https://HOST/api/2.1/unity-catalog"\n'
            'catalog = "main"\ntoken = "env:UC_TOKEN"',
        )
    for name in sources:
        require_source(config, name)
    lake = lake_of(config)
    for name in sources or list(config.sources):
        yield from register_source(lake, config.catalog, name)


def register_source(
    lake: LakeFactory, settings: CatalogSettings, source: str
) -> Iterator[NameReport]:
    """Name the tables of one source. Blocks. Raises as `register`."""
    listing = lake.catalog_listing(source)
    with open_schema(settings, source) as session:
        yield from register_all(session, listing)


def check_catalog(config: Config) -> list[CheckLine]:
    """Return a line for each source about the catalog; none without `[catalog]`. Read-only.

    Faults are warnings: they keep no change from the lake.
    """
    if config.catalog is None:
        return []
    lake = lake_of(config)
    return [_checked(lake, config.catalog, name) for name in config.sources]


def _checked(lake: LakeFactory, settings: CatalogSettings, source: str) -> CheckLine:
    subject = f"catalog {settings.kind}"
    try:
        with open_schema(settings, source) as session:
            found = session.location_of(EPOCHS)
            own = _absolute(f"{lake.place(source)}/{EPOCHS}")
            name = f"{session.schema}.{EPOCHS}"
    except IngestdError as error:
        return CheckLine(source, subject, "warn", error.what, error.remedy)
    if found is None:
        return CheckLine(source, subject, "ok", f"it answers; {name} will be created")
    if not is_same_location(found, own):
        remedy = f"drop {name} in the catalog, or set another [catalog] schema_name"
        return CheckLine(source, subject, "warn", f"{name} is at {found}, not at {own}", remedy)
    return CheckLine(source, subject, "ok", f"it answers; {name} is at {own}")


def _absolute(place: str) -> str:
    return place if "://" in place else str(Path(place).absolute())

"""The kinds of catalogs by `[catalog] kind`. A new kind needs a module and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingestd.catalogs.names import CatalogSession
    from ingestd.config import CatalogSettings


def _unity(settings: CatalogSettings, schema: str) -> CatalogSession:
    from ingestd.catalogs.unity import UnitySchema  # noqa: PLC0415 - slow to import

    return UnitySchema(settings, schema)


def _glue(settings: CatalogSettings, schema: str) -> CatalogSession:
    from ingestd.catalogs.glue import GlueSchema  # noqa: PLC0415 - slow to import

    return GlueSchema(settings, schema)


KINDS: dict[str, Callable[[CatalogSettings, str], CatalogSession]] = {
    "glue": _glue,
    "unity": _unity,
}


@contextmanager
def open_schema(settings: CatalogSettings, source: str) -> Iterator[CatalogSession]:
    """Open the schema of a source, and close it. Raises OperatorError without its library."""
    session = KINDS[settings.kind](settings, settings.schema_of(source))
    try:
        yield session
    finally:
        session.close()

"""Shell completion of source and table names, from the config and a local lake.

On an error nothing is proposed. No database is queried.
"""

from __future__ import annotations

import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from ingestd.cli.config_path import DEFAULT_CONFIG


def sources(ctx: Any, incomplete: str) -> list[str]:  # noqa: ANN401 - click's context, or typer's
    """Return the sources' names that begin with `incomplete`."""
    found = _sources(_document(ctx))
    return sorted(name for name in found if name.startswith(incomplete))


def tables(ctx: Any, incomplete: str) -> list[str]:  # noqa: ANN401
    """Return the tables of the given source, from the lake and the config."""
    document = _document(ctx)
    source = str(ctx.params.get("source") or "")
    section = _sources(document).get(source, {})
    plain = {p for p in _texts(section.get("tables")) if not set(p) & set("*?[!")}
    described = section.get("table")
    named = plain | (set(described) if isinstance(described, dict) else set())
    lake = document.get("lake")
    if source and isinstance(lake, dict):
        named |= _in_lake(str(lake.get("uri", "")), source)
    return sorted(name for name in named if name.startswith(incomplete))


def _document(ctx: Any) -> dict[str, Any]:  # noqa: ANN401
    path = Path(ctx.params.get("config") or DEFAULT_CONFIG)
    with suppress(OSError, ValueError):
        return tomllib.loads(path.read_text("utf-8"))
    return {}


def _sources(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = document.get("sources")
    if not isinstance(found, dict):
        return {}
    return {name: section for name, section in found.items() if isinstance(section, dict)}


def _texts(value: object) -> list[str]:
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def _in_lake(uri: str, source: str) -> set[str]:
    """Return the tables of a source in a local lake."""
    if not uri or "://" in uri:
        return set()
    from ingestd.app.lakes import local_tables  # noqa: PLC0415 - slow

    with suppress(OSError):
        return {str(table) for table in local_tables(uri, source)}
    return set()

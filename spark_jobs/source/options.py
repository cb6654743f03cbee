"""Options of `spark.read.format("ingestd")`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ingestd.config.units import seconds, size_bytes
from ingestd.model.errors import ConfigError
from ingestd.model.schema import TableId

FORMAT = "ingestd"


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The table to read, and how.

    `config`: a config file that the driver can read; `source`, `table`: in that config. `columns`:
    only these, by the lake's names. `where`: an SQL condition that Postgres applies. `limit`: at
    most this many rows, in no particular order. `partitions`: their number; by default as many as
    `split_bytes` requires. `resumable`: split by the key, not by blocks. `raw`: with `_cdc_raw`.
    `pushdown`: accept filters from Spark (see `spark_jobs.datasource`). `snapshot_idle`,
    `snapshot_limit` (seconds), `keeper_host`: see `spark_jobs.source.exported_snapshot`.
    """

    config: Path
    source: str
    table: TableId
    columns: tuple[str, ...] | None = None
    where: str | None = None
    limit: int | None = None
    partitions: int | None = None
    split_bytes: int = 64_000_000
    resumable: bool = False
    raw: bool = True
    pushdown: bool = False
    snapshot_idle: float | None = None
    snapshot_limit: float = 6 * 3600.0
    keeper_host: str | None = None


def parse_options(options: Mapping[str, str]) -> SourceOptions:
    """Return the options that Spark passes: names in lower case, values as texts.

    Raises ConfigError for an unknown option (with the nearest name), an invalid value, or if one
    of `config`, `source` and `table` is missing.
    """
    known = [field.name for field in fields(SourceOptions)]
    found: dict[str, Any] = {}
    for name, text in options.items():
        if name not in known:
            raise ConfigError(*_unknown(name, known))
        try:
            found[name] = _READERS[name](text)
        except ValueError as error:
            raise ConfigError(f"option {name}: {error}") from None
    for name in ("config", "source", "table"):
        if name not in found:
            raise ConfigError(
                f"option {name} is missing",
                remedy=f'spark.read.format("{FORMAT}").option("config", "ingestd.toml")'
                '.option("source", "shop").option("table", "public.orders").load()',
            )
    return SourceOptions(**found)


def _unknown(name: str, known: list[str]) -> tuple[str]:
    if name == "path":
        return ("load() accepts no path here: name the table with the option `table`",)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; the options are {', '.join(known)}"
    return (f"option {name}: there is no such option{hint}",)


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _flag(text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        msg = f"write true or false, not {text!r}"
        raise ValueError(msg)
    return text.lower() == "true"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        msg = f"write a whole number above 0, not {text!r}"
        raise ValueError(msg)
    return int(text)


def _limit(text: str) -> int:
    if not text.isdecimal():
        msg = f"write a whole number, not {text!r}"
        raise ValueError(msg)
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    """Return the names in ``a,b``, or in a JSON array (for commas or blanks in names)."""
    if text.lstrip().startswith("["):
        try:
            names = json.loads(text)
        except json.JSONDecodeError as error:
            msg = f"not a JSON array: {error}"
            raise ValueError(msg) from None
    else:
        names = [name.strip() for name in text.split(",")]
    if not names or not all(isinstance(name, str) and name for name in names):
        msg = 'write names, like "id,note", or a JSON array of them'
        raise ValueError(msg)
    if len(set(names)) != len(names):
        msg = "a name appears twice"
        raise ValueError(msg)
    return tuple(names)


def _condition(text: str) -> str:
    if not text.strip():
        msg = "is empty; write an SQL condition, as after WHERE"
        raise ValueError(msg)
    return text


_READERS: Mapping[str, Callable[[str], Any]] = {
    "config": _path,
    "source": str,
    "table": TableId.parse,
    "columns": _names,
    "where": _condition,
    "limit": _limit,
    "partitions": _count,
    "split_bytes": size_bytes,
    "resumable": _flag,
    "raw": _flag,
    "pushdown": _flag,
    "snapshot_idle": seconds,
    "snapshot_limit": seconds,
    "keeper_host": str,
}

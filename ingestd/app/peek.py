"""The last epochs and changes in a source's lake: the data of `ingestd epochs` and `peek`.

Read-only; works with and without a running daemon.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from ingestd.app.factories import lake_of
from ingestd.config import Config, TableSettings
from ingestd.config.redaction import MASK
from ingestd.model.changes import OF_BEFORE, RESERVED_PREFIX
from ingestd.model.errors import ConfigError, OperatorError, did_you_mean_table
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.ports import LakeFactory

_HASH = re.compile(r"[0-9a-f]{64}\Z")
_VERSION = re.compile(r"__v\d+\Z")


def last_epochs(config: Config, source: str, limit: int) -> dict[str, Any]:
    """Return the document of `ingestd epochs --json`: the last epochs, newest first.

    ``{"source", "epochs": [{"epoch", "first_lsn", "end_lsn", "last_commit_ts", "committed_at",
    "transactions", "rows", "bytes", "tables": [{"table", "version", "rows"}]}]}``.
    """
    rows = lake_of(config).last_epochs(source, limit)
    return {"source": source, "epochs": [_epoch(row) for row in rows]}


def _epoch(row: Mapping[str, Any]) -> dict[str, Any]:
    lsns = {name: str(Lsn(row[name])) for name in ("first_lsn", "end_lsn")}
    return {**{name: _plain(value) for name, value in row.items()}, **lsns}


def last_changes(config: Config, source: str, table: str, limit: int) -> dict[str, Any]:
    """Return the document of `ingestd peek --json`: the last changes by position, newest first.

    ``{"source", "table", "changes": [{"op", "lsn", "seq", "xid", "ts", "epoch", "columns",
    "before", "unchanged", "raw"}]}``, columns by the lake's names. Columns that the config masks or
    excludes are never shown in the clear, even if older rows contain them. Raises ConfigError for
    a table that is not in the lake, OperatorError if the source has no tables there.
    """
    try:
        name = TableId.parse(table)
    except ValueError as error:
        raise ConfigError(f"{table}: write it as schema.table, like public.orders") from error
    lake = lake_of(config)
    rows = lake.last_changes(source, name, limit)
    if rows is None:
        raise _unknown(lake, source, name, config.lake.uri)
    controls = config.sources[source].controls(name)
    changes = [_change(row, controls) for row in rows]
    return {"source": source, "table": str(name), "changes": changes}


def _change(row: Mapping[str, Any], controls: TableSettings) -> dict[str, Any]:
    def shown(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _plain(hidden(name, v, controls)) for name, v in values.items()}

    before = row["_cdc_before"]
    return {
        "op": row["_cdc_op"],
        "lsn": str(Lsn(row["_cdc_lsn"])),
        "seq": row["_cdc_seq"],
        "xid": row["_cdc_xid"],
        "ts": _plain(row["_cdc_ts"]),
        "epoch": row["_cdc_epoch"],
        "columns": shown({n: v for n, v in row.items() if not n.startswith(RESERVED_PREFIX)}),
        "before": None if before is None else shown(before),
        "unchanged": row["_cdc_unchanged"] or [],
        "raw": shown(dict(row["_cdc_raw"] or ())),
    }


def hidden(name: str, value: object, controls: TableSettings) -> object:
    """Return a lake column's value, hidden if the config masks it: rows may predate the mask."""
    plain = _VERSION.sub("", name.removeprefix(OF_BEFORE)).casefold()
    kinds = {column.casefold(): kind for column, kind in controls.mask_columns.items()}
    kinds |= dict.fromkeys(map(str.casefold, controls.exclude_columns), "null")
    if value is None or plain not in kinds:
        return value
    is_masked = kinds[plain] == "sha256" and isinstance(value, str) and _HASH.match(value)
    return value if is_masked else MASK


def _unknown(
    lake: LakeFactory, source: str, table: TableId, uri: str
) -> ConfigError | OperatorError:
    there = sorted(lake.tables(source))
    if not there:
        return OperatorError(
            f"the lake {uri} has no changes of source {source} yet",
            remedy="ingestd run reads its tables; ingestd status shows the progress",
        )
    hint = did_you_mean_table(table, there) or f"there is {', '.join(map(str, there[:5]))}"
    return ConfigError(f"{table}: the lake has no changes of it; {hint.rstrip()}")


def _plain(value: object) -> object:
    """Return a value for JSON: unsupported numbers, times and bytes become text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    is_json = isinstance(value, bool | int | str) or value is None
    if is_json or (isinstance(value, float) and math.isfinite(value)):
        return value
    return _text(value)


def _text(value: object) -> str:
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, bytes):
        return f"\\x{value.hex()}"
    return format(value, "f") if isinstance(value, Decimal) else str(value)

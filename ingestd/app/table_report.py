"""The tables of a source and whether they are captured: the data of `ingestd tables`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ingestd.config import SourceSettings
from ingestd.model.errors import ConfigError, IngestdError, resnapshot_command
from ingestd.model.lake_state import RegisteredTable, TableState
from ingestd.model.schema import Column, Table, TableId, lake_type_name
from ingestd.ports import ColumnInfo, Connector, Coverage, Sink, TableInfo
from ingestd.postgres.captured.selection import why_left_out

T = TypeVar("T")

IDENTITIES = {"d": "default", "n": "nothing", "f": "full", "i": "index"}
"""REPLICA IDENTITY in the words of ALTER TABLE, by pg_class.relreplident."""

StatesByTable = Mapping[str, Mapping[str, Any]]
"""Tables by name, each as in the `tables` of a source in /status."""


@dataclass(frozen=True, slots=True)
class SourceReport:
    """A source's tables as JSON values.

    `faults`: why parts of the report could not be determined.
    """

    schemas: Sequence[str] = ()
    tables: Sequence[Mapping[str, Any]] = ()
    faults: Sequence[IngestdError] = ()


def report_to_json(reports: Mapping[str, SourceReport]) -> dict[str, Any]:
    """Return the document of `ingestd tables --json`.

    ``{"sources": {name: {"schemas": [...], "tables": [...], "faults": [{"what", "remedy"}]}}}``. A
    table has ``table`` ("schema.table"), ``schema``, ``name``, ``comment``, ``rows`` and ``bytes``
    (estimates), ``key``, ``replica_identity``, ``identity``, ``captured`` (null: not known),
    ``state``, ``snapshot_progress``, ``reason``, ``remedy``, ``reference`` (the config's) and
    ``columns``; a column ``name``,
    ``type``, ``nullable``, ``comment``, ``null_fraction`` and ``distinct`` (estimates), and the
    lake's ``lake_name``, ``lake_type`` and ``mask``, null where it is not captured.
    """
    return {
        "sources": {
            name: {
                "schemas": list(report.schemas),
                "tables": list(report.tables),
                "faults": [{"what": f.what, "remedy": f.remedy} for f in report.faults],
            }
            for name, report in reports.items()
        }
    }


def require_schema(reports: Mapping[str, SourceReport], schema: str) -> None:
    """Raise ConfigError if no source has tables in that schema; not if a report has faults."""
    there = {name for report in reports.values() for name in report.schemas}
    is_missing = any(schema == table["schema"] for r in reports.values() for table in r.tables)
    if schema in there or is_missing or any(report.faults for report in reports.values()):
        return
    raise ConfigError(
        f"--schema: no tables in a schema {schema!r}; there is {', '.join(sorted(there)) or 'none'}"
    )


async def report_tables(
    source: str,
    connector: Connector,
    sink: Sink,
    settings: SourceSettings,
    *,
    schema: str | None,
    running: StatesByTable | None,
    timeout_s: float,
) -> SourceReport:
    """Query database and lake; `running`: the running daemon's status of the tables, if any.

    `timeout_s`: for each query of the database. A query that fails adds a fault to the report; the
    others continue.
    """
    metadata = connector.metadata(timeout_s)
    committed, schemas, infos = await asyncio.gather(
        _or_fault(sink.open()),
        _or_fault(metadata.schemas()),
        _or_fault(metadata.tables(schema)),
    )
    for unanswered in (schemas, infos):
        if isinstance(unanswered, IngestdError):
            return SourceReport(faults=[unanswered])  # no further queries
    assert not isinstance(schemas, IngestdError)
    assert not isinstance(infos, IngestdError)
    faults = []
    known: Mapping[TableId, RegisteredTable] = {}
    if isinstance(committed, IngestdError):
        faults.append(committed)
    else:
        known = committed.tables
    asked = await _or_fault(connector.coverage(known, timeout_s))
    coverage = None if isinstance(asked, IngestdError) else asked
    if isinstance(asked, IngestdError):
        faults.append(asked)
    states = running if running is not None else _recorded(source, known)
    findings = SourceFindings(settings, infos, coverage, states)
    return SourceReport(schemas, findings.tables(schema), faults)


async def _or_fault(asking: Awaitable[T]) -> T | IngestdError:
    try:
        return await asking
    except IngestdError as error:
        return error


def _recorded(source: str, known: Mapping[TableId, RegisteredTable]) -> StatesByTable:
    """Return the lake's records of the tables, in the format of /status."""
    return {
        str(name): {
            "state": str(table.state),
            "reason": table.reason,
            "remedy": "fix the cause; then, with the daemon running: "
            + resnapshot_command(source, name),
        }
        for name, table in known.items()
    }


@dataclass(frozen=True, slots=True)
class Verdict:
    """A table's capture status, and its reason.

    `captured` None: not known. `state`: from the daemon or the lake, None if neither has it.
    `snapshot_progress`: the part of a running snapshot that is read, 0 to 1, if reported.
    """

    captured: bool | None
    state: str | None = None
    reason: str | None = None
    remedy: str | None = None
    snapshot_progress: float | None = None


@dataclass(frozen=True, slots=True)
class SourceFindings:
    """The findings about a source: `infos` from the catalog, `coverage` from the connector.

    `coverage` None: it could not be determined.
    """

    settings: SourceSettings
    infos: Sequence[TableInfo]
    coverage: Coverage | None
    states: StatesByTable

    def tables(self, schema: str | None) -> list[dict[str, Any]]:
        """Return all tables of the schema, or of all schemas; missing tables come last."""
        coverage = self.coverage or Coverage((), ())
        captured = {t.id: t for t in coverage.tables}
        found = [
            _table_to_json(info, self.verdict(info.id), captured.get(info.id))
            | {"reference": self.settings.controls(info.id).reference}
            for info in self.infos
        ]
        absent = [r.table.id for r in coverage.refused if r.table.oid == 0]
        names = sorted(n for n in absent if schema in {None, n.schema})
        return found + [
            _absent_to_json(name, self.verdict(name))
            | {"reference": self.settings.controls(name).reference}
            for name in names
        ]

    def verdict(self, table: TableId) -> Verdict:
        """Judge one table: by the config, then the catalog, then the table's state."""
        left_out = why_left_out(self.settings, table)
        if left_out is not None:
            return Verdict(captured=False, reason=left_out)
        if self.coverage is None:
            return Verdict(captured=None, reason="could not be determined")
        refused = next((r for r in self.coverage.refused if r.table.id == table), None)
        if refused is not None:
            error = refused.error
            return Verdict(captured=False, reason=error.reason, remedy=error.remedy)
        status = self.states.get(str(table), {})
        state = status.get("state")
        if state == TableState.STOPPED:
            reason, remedy = status.get("reason"), status.get("remedy")
            return Verdict(captured=False, state=state, reason=reason, remedy=remedy)
        if self.coverage.faults:
            fault = self.coverage.faults[0]
            return Verdict(captured=False, state=state, reason=fault.what, remedy=fault.remedy)
        return Verdict(
            captured=True,
            state=None if state == TableState.DROPPED else state,
            snapshot_progress=status.get("snapshot_progress"),
        )


def _table_to_json(info: TableInfo, verdict: Verdict, table: Table | None) -> dict[str, Any]:
    columns = {} if table is None else {c.name: c for c in table.columns}
    return {
        **_named(info.id),
        "comment": info.comment,
        "rows": info.rows,
        "bytes": info.bytes,
        "key": list(info.key),
        "replica_identity": IDENTITIES.get(info.replica_identity, info.replica_identity),
        "identity": [] if table is None else list(table.identity),
        **_judged(verdict),
        "columns": [_column_to_json(c, columns.get(c.name)) for c in info.columns],
    }


def _absent_to_json(name: TableId, verdict: Verdict) -> dict[str, Any]:
    facts: dict[str, Any] = dict.fromkeys(("comment", "rows", "bytes", "replica_identity"))
    lists: dict[str, Any] = {"key": [], "identity": [], "columns": []}
    return {**_named(name), **facts, **lists, **_judged(verdict)}


def _named(name: TableId) -> dict[str, Any]:
    return {"table": str(name), "schema": name.schema, "name": name.name}


def _judged(verdict: Verdict) -> dict[str, Any]:
    return {
        "captured": verdict.captured,
        "state": verdict.state,
        "snapshot_progress": verdict.snapshot_progress,
        "reason": verdict.reason,
        "remedy": verdict.remedy,
    }


def _column_to_json(info: ColumnInfo, column: Column | None) -> dict[str, Any]:
    return {
        "name": info.name,
        "type": info.pg_type,
        "nullable": info.nullable,
        "comment": info.comment,
        "null_fraction": info.null_fraction,
        "distinct": info.distinct,
        "lake_name": None if column is None else column.lake_name,
        "lake_type": None if column is None else lake_type_name(column.type),
        "mask": None if column is None or column.mask is None else column.mask.kind,
    }

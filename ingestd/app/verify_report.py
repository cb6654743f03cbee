"""The result of a verification as text, JSON and exit code; and the choice of its tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingestd.config import UNSTREAMED, SourceSettings, included
from ingestd.model.errors import ConfigError, did_you_mean_table
from ingestd.model.lsn import Lsn
from ingestd.model.printable_text import printable
from ingestd.model.schema import Table, TableId
from ingestd.ports import Coverage
from ingestd.ports.verify import Difference, Kind, VerifyOutcome, VerifyState

EXIT_EQUAL, EXIT_DIFFERENT, EXIT_NOT_REACHED = 0, 1, 75
_KINDS = (Kind.MISSING, Kind.EXTRA, Kind.DIFFERENT, Kind.DOUBLED)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """`lsn`: the source's position at the comparison; None if nothing was compared."""

    source: str
    lsn: Lsn | None
    outcomes: Sequence[VerifyOutcome]

    @property
    def exit_code(self) -> int:
        """0: tables were compared, and all are equal. 1: differences. 75: retry later."""
        states = {o.state for o in self.outcomes if not _is_left_out(o)}
        if VerifyState.NOT_REACHED in states and VerifyState.DIFFERENT not in states:
            return EXIT_NOT_REACHED
        return EXIT_EQUAL if states == {VerifyState.EQUAL} else EXIT_DIFFERENT

    def lines(self) -> list[str]:
        """Return it as text, one line or more for each table."""
        found = [printable(line) for outcome in self.outcomes for line in _lines(outcome)]
        counts = {state: sum(o.state is state for o in self.outcomes) for state in VerifyState}
        totals = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        at = "" if self.lsn is None else f" at {self.lsn}"
        return [*found, f"source {self.source}{at}: {totals or 'no tables'}"]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable object, with values only if requested."""
        return {
            "source": self.source,
            "lsn": None if self.lsn is None else str(self.lsn),
            "exit_code": self.exit_code,
            "tables": [_json(outcome) for outcome in self.outcomes],
        }


def asked_for(
    coverage: Coverage, settings: SourceSettings, patterns: Sequence[str]
) -> tuple[list[Table], list[VerifyOutcome]]:
    """Return the tables to compare, and outcomes for those that can't be. Raises ConfigError."""

    def is_chosen(table: TableId) -> bool:
        return not patterns or included(patterns, table.schema, table.name)

    read_whole = [t for t, s in settings.references().items() if s.reference in UNSTREAMED]
    there = [*(t.id for t in coverage.tables), *(r.table.id for r in coverage.refused), *read_whole]
    for pattern in patterns:
        _ensure_known(pattern, there, patterns)
    tables = [t for t in coverage.tables if is_chosen(t.id)]
    refused = [r for r in coverage.refused if is_chosen(r.table.id)]
    left_out = [
        VerifyOutcome(
            str(t), VerifyState.NOT_COMPARED, note="a reference table without a change log"
        )
        for t in read_whole
        if is_chosen(t)
    ]
    outcomes = [
        VerifyOutcome(str(r.table.id), VerifyState.NOT_COMPARED, fault=r.error) for r in refused
    ]
    return tables, [*outcomes, *left_out]


def _ensure_known(pattern: str, there: Collection[TableId], patterns: Sequence[str]) -> None:
    try:
        wanted = TableId.parse(pattern.removeprefix("!"))
        if any(included([pattern.removeprefix("!")], t.schema, t.name) for t in there):
            return
    except ValueError as error:
        raise ConfigError(f"TABLE {pattern}: {error}") from error
    hint = did_you_mean_table(wanted, [t for t in there if str(t) not in patterns])
    raise ConfigError(
        f"TABLE {pattern}: matches no captured table",
        remedy=f"{hint}names are schema.table, as `ingestd tables` shows them",
    )


def _is_left_out(outcome: VerifyOutcome) -> bool:
    return outcome.state is VerifyState.NOT_COMPARED and outcome.fault is None


def _lines(outcome: VerifyOutcome) -> list[str]:
    what = f"{outcome.table}: {outcome.state}"
    if outcome.state is VerifyState.EQUAL:
        what += f", {outcome.source_rows:,} rows"
    elif outcome.state is VerifyState.DIFFERENT:
        kinds = ", ".join(f"{outcome.counts[k]:,} {k}" for k in _KINDS if k in outcome.counts)
        what = (
            f"{what}: {kinds} ({outcome.source_rows:,} rows in the source,"
            f" {outcome.lake_rows:,} in the lake)"
        )
    lines = [what, *(line for one in outcome.differences for line in _difference_lines(one))]
    unshown = sum(outcome.counts.values()) - sum(d.count for d in outcome.differences)
    if unshown > 0 and outcome.differences:
        lines.append(f"    and {unshown:,} more")
    if outcome.fault is not None:
        lines += [f"    {line}" for line in str(outcome.fault).split("\n")]
    return lines if outcome.note is None else [*lines, f"    {outcome.note}"]


def _difference_lines(one: Difference) -> list[str]:
    what = f"    {one.kind:<9} {_named(one.key)}"
    if one.columns:
        what += f"  in {', '.join(one.columns)}"
    if one.count > 1:
        what += f"  ({one.count:,} times)"
    values = {"source": one.source, "lake": one.lake}
    return [what, *(f"        {side}: {_named(v)}" for side, v in values.items() if v)]


def _named(values: Mapping[str, str | None]) -> str:
    return ", ".join(f"{n}={'null' if v is None else repr(v)}" for n, v in values.items())


def _json(outcome: VerifyOutcome) -> dict[str, Any]:
    fault = outcome.fault
    return {
        "table": outcome.table,
        "state": str(outcome.state),
        "source_rows": outcome.source_rows,
        "lake_rows": outcome.lake_rows,
        "changes": outcome.changes,
        "differences": {str(k): outcome.counts.get(k, 0) for k in _KINDS},
        "rows": [
            {
                "kind": str(d.kind),
                "key": dict(d.key),
                "columns": list(d.columns),
                "count": d.count,
                "source": dict(d.source),
                "lake": dict(d.lake),
            }
            for d in outcome.differences
        ],
        "note": outcome.note,
        "fault": None if fault is None else {"what": fault.what, "remedy": fault.remedy},
    }

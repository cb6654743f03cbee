"""The results of a comparison, as text and as two Delta tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from ingestd.model.errors import IngestdError, TableChangedError
from ingestd.model.lsn import Lsn
from spark_jobs.catalog.table_names import names_in
from spark_jobs.cli.arguments import EXIT_DONE, EXIT_OPERATOR, EXIT_TRANSIENT, exit_code
from spark_jobs.reconciling.differences import DIFFERENT, EXTRA, MISSING

if TYPE_CHECKING:
    from spark_jobs.catalog.schema_name import SchemaName

_TABLES_SCHEMA = (
    "run string, at timestamp, source string, lsn long, table string, state string, note string,"
    " epoch long, mirror_version long, source_rows long, mirror_rows long, changes long,"
    " missing long, extra long, different long"
)
_DIFFERENCES_SCHEMA = (
    "run string, at timestamp, source string, lsn long, table string, kind string, count long,"
    " key string, columns array<string>, row string, source_values map<string,string>,"
    " mirror_values map<string,string>"
)


class ReconcileState(StrEnum):
    """The outcome of a table's comparison."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True, slots=True)
class Example:
    """A difference to show. `key`: as JSON, or the hash of a whole row."""

    kind: str
    count: int
    key: str
    columns: tuple[str, ...]

    @classmethod
    def from_row(cls, row: Any) -> Example:  # noqa: ANN401 - a pyspark Row
        """Return a row of `spark_jobs.reconciling.differences.differences` as an example."""
        key = row["key"] or f"row {row['row']}"
        return cls(row["kind"], row["count"], key, tuple(row["columns"] or ()))

    def __str__(self) -> str:
        what = f"    {self.kind:<9} {self.key}"
        if self.kind == DIFFERENT:
            what += f"  in {', '.join(self.columns)}"
        return what + (f"  ({self.count:,} rows)" if self.count > 1 else "")


@dataclass(frozen=True, slots=True)
class TableResult:
    """A table's result. `epoch`, `mirror_version`: of the compared mirror; None without one.

    `source_rows`: the expected rows; `changes`: the number of changes that rolled them forward.
    `fault`: why the table could not be compared.
    """

    table: str
    state: ReconcileState
    epoch: int | None = None
    mirror_version: int | None = None
    source_rows: int = 0
    mirror_rows: int = 0
    changes: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    note: str | None = None
    fault: IngestdError | None = None
    examples: tuple[Example, ...] = ()

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        if self.fault is not None:
            return [
                f"{self.table}: {self.state}",
                *(f"    {x}" for x in str(self.fault).split("\n")),
            ]
        what = f"{self.table}: {self.state}, {self.source_rows:,} rows"
        if self.state is ReconcileState.DIFFERENT:
            found = {MISSING: self.missing, EXTRA: self.extra, DIFFERENT: self.different}
            counted = ", ".join(f"{count:,} {kind}" for kind, count in found.items() if count)
            what = f"{self.table}: {counted or self.state} of {self.source_rows:,} rows"
        lines = [what, *map(str, self.examples)]
        unshown = self.missing + self.extra + self.different - sum(e.count for e in self.examples)
        if unshown > 0 and self.examples:
            lines.append(f"    and {unshown:,} more")
        return lines if self.note is None else [*lines, f"    {self.note}"]


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """One reconciliation. `at` (aware) and `lsn`: the time and position of the source."""

    id: str
    at: datetime
    source: str
    lsn: Lsn


def exit_code_of(results: Iterable[TableResult]) -> int:
    """Return 0: all equal; 1: a difference or a fault to fix; or 75: retry later."""
    codes = {EXIT_DONE}
    for result in results:
        if result.state is ReconcileState.DIFFERENT:
            codes.add(EXIT_OPERATOR)
        elif result.fault is not None:
            will_pass = isinstance(result.fault, TableChangedError)
            codes.add(EXIT_TRANSIENT if will_pass else exit_code(result.fault))
    return next(code for code in (EXIT_OPERATOR, EXIT_TRANSIENT, EXIT_DONE) if code in codes)


def summary(run: Reconciliation, results: Sequence[TableResult]) -> str:
    """Return a run's results as text, with one line or more per table."""
    lines = [line for result in results for line in result.lines()]
    counts = {state: sum(r.state is state for r in results) for state in ReconcileState}
    counted = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    lines.append(f"source {run.source} at {run.lsn}: {counted or 'no tables'}")
    return "\n".join(lines) + "\n"


def append_differences(uri: str, run: Reconciliation, table: str, differences: DataFrame) -> None:
    """Append a table's differences to `<uri>/differences`. Spark job."""
    head = _head(run, table)
    texts = f.lit(None).cast("map<string,string>")
    values = {
        name: texts
        for name in ("source_values", "mirror_values")
        if name not in differences.columns
    }
    rows = differences.withColumns({**{k: f.lit(v) for k, v in head.items()}, **values})
    names = [part.strip().split(" ")[0] for part in _split(_DIFFERENCES_SCHEMA)]
    rows = rows.withColumn("count", f.col("count").cast("long"))
    rows.select(*names).write.format("delta").mode("append").save(f"{uri}/differences")


def append_tables(
    session: SparkSession, uri: str, run: Reconciliation, results: Sequence[TableResult]
) -> None:
    """Append the results of all tables to `<uri>/tables`. Spark job."""
    rows = [
        (
            *_head(run, r.table).values(),
            str(r.state),
            r.note if r.fault is None else str(r.fault),
            r.epoch,
            r.mirror_version,
            r.source_rows,
            r.mirror_rows,
            r.changes,
            r.missing,
            r.extra,
            r.different,
        )
        for r in results
    ]
    frame = session.createDataFrame(rows, _TABLES_SCHEMA)
    frame.coalesce(1).write.format("delta").mode("append").save(f"{uri}/tables")


def name_report(
    session: SparkSession, schema: SchemaName | None, source: str, uri: str
) -> IngestdError | None:
    """Name the tables of a report in a schema; return the catalog's fault."""
    names = names_in(session, schema, source, "reconcile")
    names.open()
    for table in ("tables", "differences"):
        names.put_log(f"_reconcile_{table}", f"{uri}/{table}")
    return names.fault


def _head(run: Reconciliation, table: str) -> dict[str, Any]:
    return {
        "run": run.id,
        "at": run.at,
        "source": run.source,
        "lsn": int(run.lsn),
        "table": table,
    }


def _split(schema: str) -> list[str]:
    return schema.replace("map<string,string>", "map").split(",")

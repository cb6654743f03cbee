"""What a mirror or history says of itself: comments and properties, in its Delta log.

They are set by path, not by name: some catalogs allow no ALTER TABLE, and readers by path see them,
too. Each is set only if it differs, since each is a commit.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.errors import ParseException

from spark_jobs.delta_log.commits import signed
from spark_jobs.delta_log.statements import at_path, comment_columns, set_properties
from spark_jobs.lake.columns import RAW

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ingestd.lake.definitions import Definition
    from spark_jobs.delta_log.commits import Signature

_COMMENT = "comment"
"""The table's comment, among its properties."""
_WHAT = {"mirror": "Current rows", "history": "All versions of the rows", "feed": "Changes"}
OWN_COLUMNS: Mapping[str, str] = {
    RAW: "Texts of values that their columns can't hold, by the name of the column",
    "_cdc_lsn": "Position of the row's last change: LSN of its commit record",
    "_cdc_seq": "Position of the row's last change in its transaction",
    "_cdc_deleted_at": "Commit time of the row's deletion; null for a row that exists",
}
"""Comments of columns that the source does not have."""


@dataclass(frozen=True, slots=True)
class CatalogDescription:
    """Comments and properties of a table. `columns`: comments by column name."""

    comment: str
    properties: Mapping[str, str]
    columns: Mapping[str, str]

    @classmethod
    def of(cls, definition: Definition, source: str, job: str) -> CatalogDescription:
        """Return the description of a job's table."""
        what = _WHAT.get(job, "Rows")
        own = {c.name: c.comment for c in definition.columns if c.comment}
        return cls(
            f"{what} of {definition.table} of source {source}, kept by ingestd's {job} job",
            {
                "ingestd.source": source,
                "ingestd.table": definition.table,
                "ingestd.key": json.dumps(list(definition.key), ensure_ascii=False),
            },
            {**OWN_COLUMNS, **own},
        )

    def apply(self, session: SparkSession, path: str, signature: Signature) -> None:
        """Bring the table at a path to this description. Commits are signed.

        A comment that the source no longer has stays: it may be a user's. Raises PySparkException.
        """
        table = at_path(path)
        [there] = session.sql(f"DESCRIBE DETAIL {table}").collect()
        wanted = {k: v for k, v in self.properties.items() if there["properties"].get(k) != v}
        if not there["description"]:
            wanted[_COMMENT] = self.comment
        with signed(session, signature, None):
            if wanted:
                session.sql(set_properties(path, wanted))
            self.apply_to_columns(session, path)

    def apply_to_columns(self, session: SparkSession, path: str) -> None:
        """Set the comments of columns that differ: one commit, or on Spark 3.5 one each."""
        table = at_path(path)
        rows = session.sql(f"DESCRIBE TABLE {table}").collect()
        columns = itertools.takewhile(lambda row: row["col_name"], rows)  # then other facts
        changes = {
            row["col_name"]: comment
            for row in columns
            if (comment := self.columns.get(row["col_name"])) is not None
            and row["comment"] != comment
        }
        if not changes:
            return
        try:
            [at_once] = comment_columns(path, changes, at_once=True)
            session.sql(at_once)
        except ParseException:
            for statement in comment_columns(path, changes, at_once=False):
                session.sql(statement)

"""The tables of one schema in Spark's catalog, read and changed by SQL alone.

So it is the same for a Hive metastore, Unity Catalog, Glue or Polaris, and on Spark Connect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pyspark.errors import AnalysisException

from ingestd.model.errors import OperatorError
from spark_jobs.catalog.schema_name import SESSION_CATALOG, SchemaName
from spark_jobs.delta_log.checked_tables import CheckedTables
from spark_jobs.delta_log.faults import SPARK_ERRORS
from spark_jobs.delta_log.statements import create_name, create_schema, drop_name
from spark_jobs.spark_errors import condition_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DETAILS = "# Detailed Table Information"
_NO_FILES = "DELTA_PATH_DOES_NOT_EXIST"
_S3 = re.compile(r"\As3[an]?://")
_LOCAL = re.compile(r"\Afile:/*")


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """What a catalog has under a name. `kind`: such as EXTERNAL, MANAGED, VIEW.

    `location` and `provider` are empty where there is none, as of a view.
    """

    kind: str
    provider: str
    location: str

    def is_at(self, path: str) -> bool:
        """Return whether it is the Delta table at a path."""
        return self.provider.lower() == "delta" and same_location(self.location, path)

    def __str__(self) -> str:
        """Return what it is, for a message."""
        what = f"a {self.provider} table" if self.provider else f"a {self.kind.lower()}"
        return f"{what} at {self.location}" if self.location else what


@dataclass(frozen=True, slots=True)
class CatalogSchema:
    """A schema in the catalog of a session. All methods raise Spark's errors."""

    session: SparkSession
    name: SchemaName

    def ensure(self) -> None:
        """Create the schema unless it exists.

        Raises OperatorError if the session does not have its catalog.
        """
        catalog = self.session.catalog
        before = catalog.currentCatalog()
        try:
            catalog.setCurrentCatalog(self.name.catalog)
        except SPARK_ERRORS as error:
            raise OperatorError(
                f"this Spark session has no catalog {self.name.catalog}",
                remedy=f"--conf spark.sql.catalog.{self.name.catalog}=CLASS, with its jar, as the"
                f" catalog's documentation says; or --catalog {SESSION_CATALOG}.SCHEMA for a Hive"
                " metastore",
            ) from error
        finally:
            catalog.setCurrentCatalog(before)
        # (a user who may only use an existing schema must not be asked for more)
        if not catalog.databaseExists(str(self.name)):
            self.session.sql(create_schema(str(self.name)))

    def find(self, table: str) -> CatalogEntry | None:
        """Return what the schema has under a name; None if nothing."""
        named = self.name.table(table)
        try:
            # (Spark 4 logs a DESCRIBE that finds nothing as an error)
            if not self.session.catalog.tableExists(named):
                return None
            rows = self.session.sql(f"DESCRIBE TABLE EXTENDED {named}").collect()
        except AnalysisException as error:
            if condition_of(error) == _NO_FILES:  # a name whose table was deleted by path
                place = (error.getMessageParameters() or {}).get("path", "")
                return CatalogEntry("EXTERNAL", "delta", place)
            raise
        names = [row["col_name"] for row in rows]
        # (a column may have that name; the details come last)
        count = names[::-1].index(_DETAILS) if _DETAILS in names else 0
        details = rows[len(rows) - count :]
        found = {row["col_name"]: row["data_type"] for row in reversed(details)}
        return CatalogEntry(
            found.get("Type", "table"), found.get("Provider", ""), found.get("Location", "")
        )

    def has_table(self, path: str) -> bool:
        """Return whether a path has a Delta table."""
        try:
            return bool(CheckedTables.columns(self.session, path))
        except AnalysisException:
            return False

    def add(self, table: str, path: str, comment: str) -> None:
        """Name the Delta table at a path. Does not change the table. Idempotent."""
        self.session.sql(create_name(self.name.table(table), path, comment))

    def drop(self, table: str) -> None:
        """Remove a name. The files of an external table stay."""
        self.session.sql(drop_name(self.name.table(table)))


def same_location(one: str, other: str) -> bool:
    """Return whether two locations, as Spark or a catalog writes them, are the same folder."""
    return bool({_plain(one), _plain(unquote(one))} & {_plain(other), _plain(unquote(other))})


def _plain(location: str) -> str:
    return _S3.sub("s3://", _LOCAL.sub("/", location)).rstrip("/")

"""Adding columns to a job's table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spark_jobs.lake.columns import needs_column_mapping, quoted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def add_columns(session: SparkSession, path: str, columns: Mapping[str, str]) -> None:
    """Add columns to a Delta table: name and SQL type. At most two commits."""
    table = f"delta.{quoted(path)}"
    properties = []
    if needs_column_mapping(list(columns)):
        properties.append("'delta.columnMapping.mode' = 'name'")
    if any("timestamp_ntz" in kind for kind in columns.values()):
        properties.append("'delta.feature.timestampNtz' = 'supported'")
    if properties:
        session.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ({', '.join(properties)})")
    added = ", ".join(f"{quoted(name)} {kind}" for name, kind in columns.items())
    session.sql(f"ALTER TABLE {table} ADD COLUMNS ({added})")

"""Statements that change Delta tables, as Spark's SQL: the only way that is public on every Spark.

All names and values are quoted here. Expressions of a table's own rows are SQL, too; those of the
rows to be merged are computed as columns of these before.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

from spark_jobs.delta_log.commits import settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

AS_WRITTEN = {
    "spark.sql.variable.substitute": "false",
    "spark.sql.parser.escapedStringLiterals": "false",
}
"""Settings under which Spark reads a statement as it is written here, whatever a name contains."""


def quoted(name: str) -> str:
    """Return a name quoted."""
    return "`" + name.replace("`", "``") + "`"


def literal(value: object) -> str:
    """Return a value as an expression. All but null, bool, int and date still need a cast.

    A list becomes an array of such.
    """
    match value:
        case None | bool():
            found = {None: "NULL", True: "true", False: "false"}[value]
        case int():
            found = str(value)
        case bytes():
            found = f"X'{value.hex()}'"
        case list():
            found = f"array({', '.join(map(literal, value))})"
        case date() if not isinstance(value, datetime):
            found = f"DATE '{value.isoformat()}'"
        case _ if set("'\\$").isdisjoint(str(value)):
            found = f"'{value}'"
        case _:  # (a session may read a backslash and `${` otherwise)
            found = f"decode(X'{str(value).encode().hex()}', 'UTF-8')"
    return found


def string(text: str) -> str:
    """Return a string where no expression may be."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def at_path(path: str) -> str:
    """Return the name of the table in a folder."""
    return f"delta.{quoted(path)}"


def run(session: SparkSession, statement: str) -> None:
    """Run a statement of this module."""
    with settings(session, AS_WRITTEN):
        session.sql(statement)


def history_of(session: SparkSession, path: str, most: int) -> list[Any]:
    """Return the newest commits of a table: version, timestamp, operation, userMetadata. A job."""
    with settings(session, AS_WRITTEN):
        found = session.sql(f"DESCRIBE HISTORY {at_path(path)} LIMIT {most}")
        return found.select("version", "timestamp", "operation", "userMetadata").collect()


def state_of(session: SparkSession, path: str) -> list[Any]:
    """Return a table's id, properties, and what differs between its versions. A Spark job."""
    columns = ("format", "id", "properties", "lastModified", "numFiles", "sizeInBytes")
    with settings(session, AS_WRITTEN):
        return session.sql(f"DESCRIBE DETAIL {at_path(path)}").select(*columns).collect()


def create(
    path: str,
    columns: Mapping[str, str],
    properties: Mapping[str, str],
    *,
    clustering: Sequence[str] = (),
) -> str:
    """Return the statement that creates a table. `columns`: name to type."""
    by = f" CLUSTER BY ({', '.join(map(quoted, clustering))})" if clustering else ""
    return (
        f"CREATE TABLE {at_path(path)} ({_columns(columns)}) USING delta{by}"
        f" TBLPROPERTIES ({_properties(properties)})"
    )


def cluster(path: str, by: Sequence[str]) -> str:
    """Return the statement that clusters a table by these columns."""
    return f"ALTER TABLE {at_path(path)} CLUSTER BY ({', '.join(map(quoted, by))})"


def add_columns(path: str, columns: Mapping[str, str]) -> str:
    """Return the statement that adds columns, name to type."""
    return f"ALTER TABLE {at_path(path)} ADD COLUMNS ({_columns(columns)})"


def set_properties(path: str, properties: Mapping[str, str]) -> str:
    """Return the statement that sets properties of a table."""
    return f"ALTER TABLE {at_path(path)} SET TBLPROPERTIES ({_properties(properties)})"


def comment_columns(path: str, comments: Mapping[str, str], *, at_once: bool) -> list[str]:
    """Return the statements that set comments of columns. `at_once`: in one, from Spark 4 on."""
    changes = [f"{quoted(name)} COMMENT {string(text)}" for name, text in comments.items()]
    parts = [", ".join(changes)] if at_once else changes
    return [f"ALTER TABLE {at_path(path)} ALTER COLUMN {part}" for part in parts]


def create_schema(schema: str) -> str:
    """Return the statement that creates a schema of a catalog. `schema`: quoted."""
    return f"CREATE SCHEMA IF NOT EXISTS {schema}"


def create_name(table: str, path: str, comment: str) -> str:
    """Return the statement that names the table at a path. `table`: quoted."""
    about = f"COMMENT {string(comment)} LOCATION {string(path)}"
    return f"CREATE TABLE IF NOT EXISTS {table} USING DELTA {about}"


def drop_name(table: str) -> str:
    """Return the statement that removes a table's name. `table`: quoted."""
    return f"DROP TABLE IF EXISTS {table}"


def unset_property(path: str, name: str) -> str:
    """Return the statement that removes a property of a table."""
    return f"ALTER TABLE {at_path(path)} UNSET TBLPROPERTIES ({string(name)})"


def update(path: str, values: Mapping[str, str], where: str) -> str:
    """Return the statement that changes rows. `values`: column to expression."""
    return f"UPDATE {at_path(path)} SET {_assigned(values)} WHERE {where}"  # noqa: S608 - quoted


def delete_matched(where: str = "true") -> str:
    """Return the clause that deletes rows of the table that match."""
    return f"WHEN MATCHED AND {where} THEN DELETE"


def update_matched(values: Mapping[str, str], where: str) -> str:
    """Return the clause that changes rows of the table that match."""
    return f"WHEN MATCHED AND {where} THEN UPDATE SET {_assigned(values)}"


def insert_unmatched(values: Mapping[str, str], where: str) -> str:
    """Return the clause that inserts rows of the source that match none."""
    names, expressions = ", ".join(map(quoted, values)), ", ".join(values.values())
    inserted = f"INSERT ({names}) VALUES ({expressions})"  # noqa: S608 - quoted
    return f"WHEN NOT MATCHED AND {where} THEN {inserted}"


def merge(
    session: SparkSession, path: str, source: DataFrame, on: str, clauses: Sequence[str]
) -> None:
    """Merge rows into a table. In `on` and `clauses`, `t` is the table and `s` the rows.

    `source`: of this session.
    """
    view = f"ingestd_{uuid.uuid4().hex}"
    source.createOrReplaceTempView(view)
    try:
        run(
            session,
            f"MERGE INTO {at_path(path)} AS t USING {quoted(view)} AS s ON {on}"
            f" {' '.join(clauses)}",
        )
    finally:
        session.catalog.dropTempView(view)


def _assigned(values: Mapping[str, str]) -> str:
    return ", ".join(f"{quoted(name)} = {value}" for name, value in values.items())


def _columns(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{quoted(name)} {kind}" for name, kind in columns.items())


def _properties(properties: Mapping[str, str]) -> str:
    return ", ".join(f"{string(name)} = {string(text)}" for name, text in properties.items())

"""The schema in which a job names its tables."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_jobs.delta_log.statements import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

SESSION_CATALOG = "spark_catalog"
"""Spark's own: a Hive metastore, if the session has one."""
_PART = r"(?:[^`.\s]+|`(?:[^`]|``)+`)"
_NAME = re.compile(rf"({_PART})\.({_PART})\Z")


@dataclass(frozen=True, slots=True)
class SchemaName:
    """A schema of a catalog, as `--catalog CATALOG.SCHEMA` names it."""

    catalog: str
    schema: str

    @classmethod
    def parse(cls, text: str) -> SchemaName:
        """Return the schema in a text. Raises ArgumentTypeError unless it has two names."""
        found = _NAME.match(text)
        if found is None:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not CATALOG.SCHEMA, such as main.shop or spark_catalog.shop; a name"
                " with a dot or a space is written in backticks"
            )
        return cls(*map(_unquoted, found.groups()))

    def __str__(self) -> str:
        """Return the name, quoted for SQL."""
        return f"{quoted(self.catalog)}.{quoted(self.schema)}"

    def table(self, name: str) -> str:
        """Return the name of a table in this schema, quoted for SQL."""
        return f"{self}.{quoted(name)}"

    @property
    def session_settings(self) -> Mapping[str, str]:
        """Settings of a session that the job starts.

        Without Hive, names in Spark's own catalog exist only until the session ends.
        """
        is_own = self.catalog.lower() == SESSION_CATALOG
        return {"spark.sql.catalogImplementation": "hive"} if is_own else {}


def add_catalog(parser: argparse.ArgumentParser, tables: str) -> None:
    """Add --catalog. `tables`: what is named, in the plural."""
    parser.add_argument(
        "--catalog",
        type=SchemaName.parse,
        metavar="CATALOG.SCHEMA",
        help=f"name the {tables} there, by Spark's catalog",
    )


def _unquoted(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name

"""A lake's tables as a catalog shows them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingestd.model.errors import IngestdError

_SQL_NAMES = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint"}
"""Delta's names of types that SQL calls differently."""


@dataclass(frozen=True, slots=True)
class CatalogColumn:
    """A column. `kind`: its type as Delta's schema has it, a name or an object."""

    name: str
    kind: Any
    comment: str | None = None

    @property
    def sql_type(self) -> str:
        """The type in SQL, as Hive and Spark write it."""
        return sql_type(self.kind)


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """A Delta table. `name`: in its schema of a catalog; `location`: an absolute URI."""

    name: str
    location: str
    comment: str
    columns: tuple[CatalogColumn, ...]
    properties: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CatalogListing:
    """What a catalog should have of a source.

    `dropped`: locations of tables that the source or the config no longer has, by name. `faults`:
    why a table can't be listed, by name.
    """

    tables: tuple[CatalogTable, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, IngestdError] = field(default_factory=dict)


def sql_type(kind: Any) -> str:  # noqa: ANN401 - JSON
    """Return a type of Delta's schema in SQL.

    Source: Delta transaction log protocol, "Schema Serialization Format".
    """
    if isinstance(kind, str):
        return _SQL_NAMES.get(kind, kind)
    if kind["type"] == "array":
        return f"array<{sql_type(kind['elementType'])}>"
    if kind["type"] == "map":
        return f"map<{sql_type(kind['keyType'])},{sql_type(kind['valueType'])}>"
    fields = (f"{each['name']}:{sql_type(each['type'])}" for each in kind["fields"])
    return f"struct<{','.join(fields)}>"

"""The features of a Delta table that prevent ingestd from writing to it.

A writer that does not know a feature must not write, as readers that rely on the feature would miss
something in its commits. Some features impose nothing on a writer when listed but not in use.
Source: Delta protocol, "Table Features", "Requirements for Writers".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from ingestd.lake.store.errors import FeatureError
from ingestd.model.printable_text import printable
from ingestd.model.schema import lake_type_name

_FEATURES = 7
"""The lowest writer version at which a table lists its features."""
_BY_VERSION: Mapping[int, tuple[str, ...]] = {
    2: ("appendOnly", "invariants"),
    3: ("checkConstraints",),
    4: ("changeDataFeed", "generatedColumns"),
    5: ("columnMapping",),
    6: ("identityColumns",),
}
"""The features that each lower version adds to those of the versions before it."""
_ASKS_NOTHING = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "deletionVectors",
        "timestampNtz",
        "v2Checkpoint",
        "variantType",
    }
)
"""Features that impose nothing on a commit that adds files, or that replaces files without changing
rows; deltalake can alter tables that list them. deltalake itself lists `timestampNtz` when it adds
such a column, and `variantType` when it adds a column to a table that has variants. A variant
column was made by another engine, and is null in rows added here."""
MAPPING_MODE = "delta.columnMapping.mode"
FILES_BY_NAME = f"ALTER TABLE {{t}} SET TBLPROPERTIES ('{MAPPING_MODE}' = 'none')"
"""Makes Spark rewrite the files with the current column names."""


@dataclass(frozen=True, slots=True)
class TableTraits:
    """The traits of a table version that matter to its writers.

    `features`: as listed; empty for a writer version that lists none.
    """

    writer_version: int
    features: Collection[str]
    schema: pa.Schema
    configuration: Mapping[str, str]
    partitions: Collection[str] = ()

    @property
    def all_features(self) -> list[str]:
        """Return the features that are listed, or implied by the writer version."""
        if self.writer_version >= _FEATURES:
            return sorted(self.features)
        versions = (v for v in _BY_VERSION if v <= self.writer_version)
        return [feature for version in versions for feature in _BY_VERSION[version]]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The reason why ingestd can't write to a table.

    `undo`: the statement for Spark that removes it, with ``{t}`` for the table; empty if Spark
    can't remove the feature.
    """

    what: str
    undo: str = ""


class NotWritableError(FeatureError):
    """The table uses a feature that ingestd does not write."""

    def __init__(self, uri: str, obstacle: Obstacle) -> None:
        super().__init__(uri, f"{obstacle.what}, which ingestd does not write", obstacle.undo)


def find_obstacle(traits: TableTraits, *, removes_rows: bool = False) -> Obstacle | None:
    """Return the obstacle to writing to such a table, None if there is none.

    `removes_rows`: the commits may also remove rows.
    """
    untyped = next((f for f in traits.schema if not _has_lake_type(f.type)), None)
    if untyped is not None:
        return Obstacle(f"the column {untyped.name} has a type that no table of ingestd has")
    if traits.partitions:
        return Obstacle(f"it is partitioned by {', '.join(traits.partitions)}")
    features = traits.all_features
    unknown = [f for f in features if f not in _USES and f not in _ASKS_NOTHING]
    if unknown:
        undo = "; ".join(f"ALTER TABLE {{t}} DROP FEATURE {f}" for f in _DROPPED if f in unknown)
        named = "feature" if len(unknown) == 1 else "features"
        return Obstacle(
            f"it has the table {named} {', '.join(unknown)}",
            undo if set(unknown) <= set(_DROPPED) else "",
        )
    of_removals = _OF_REMOVALS if removes_rows else {}
    checks = [
        check for feature, check in [*_USES.items(), *of_removals.items()] if feature in features
    ]
    return next((found for check in checks if (found := check(traits)) is not None), None)


def _has_lake_type(kind: pa.DataType) -> bool:
    try:
        lake_type_name(kind)
    except TypeError:
        return False
    return True


def _mapping(traits: TableTraits) -> Obstacle | None:
    mode = traits.configuration.get(MAPPING_MODE, "none")
    return None if mode == "none" else Obstacle(f"it has column mapping ({mode})", FILES_BY_NAME)


def _constraints(traits: TableTraits) -> Obstacle | None:
    prefix = "delta.constraints."
    names = sorted(n.removeprefix(prefix) for n in traits.configuration if n.startswith(prefix))
    if not names:
        return None
    undo = (
        f"ALTER TABLE {{t}} DROP CONSTRAINT {quoted(names[0])}" if can_be_pasted(names[0]) else ""
    )
    return Obstacle(f"it has the CHECK constraint {names[0]}", undo)


def _invariants(traits: TableTraits) -> Obstacle | None:
    for path, field in _fields(traits.schema):
        name = ".".join(map(quoted, path))
        if not field.nullable:
            undo = f"ALTER TABLE {{t}} ALTER COLUMN {name} DROP NOT NULL"
            undo = undo if can_be_pasted(name) else ""
            return Obstacle(f"the column {'.'.join(path)} is NOT NULL", undo)
    return _where_field("delta.invariants", "has an invariant")(traits)


def _where_field(key: str, has: str) -> Callable[[TableTraits], Obstacle | None]:
    """Return a check that no column has this metadata."""

    def find(traits: TableTraits) -> Obstacle | None:
        for path, field in _fields(traits.schema):
            if key.encode() in (field.metadata or {}):
                return Obstacle(f"the column {'.'.join(path)} {has}")
        return None

    return find


def _where_true(name: str) -> Callable[[TableTraits], Obstacle | None]:
    """Return a check that this table property is not true."""

    def find(traits: TableTraits) -> Obstacle | None:
        if traits.configuration.get(name, "false").lower() != "true":
            return None
        return Obstacle(
            f"it has {name}", f"ALTER TABLE {{t}} SET TBLPROPERTIES ('{name}' = 'false')"
        )

    return find


_USES: Mapping[str, Callable[[TableTraits], Obstacle | None]] = {
    "checkConstraints": _constraints,
    "columnMapping": _mapping,
    "generatedColumns": _where_field("delta.generationExpression", "is generated"),
    "invariants": _invariants,
}
"""Features that constrain a writer only where they are in use."""
_OF_REMOVALS = {
    "appendOnly": _where_true("delta.appendOnly"),
    "changeDataFeed": _where_true("delta.enableChangeDataFeed"),
}
"""The same, for a commit that removes rows."""
_DROPPED = ("rowTracking", "inCommitTimestamp", "domainMetadata")
"""Features that Spark can drop without adding another (checkpointProtection), in this order: the
first depends on the last."""


def _fields(schema: pa.Schema) -> Iterator[tuple[tuple[str, ...], pa.Field]]:
    """Yield each column, and each field inside one, with the path of names to it."""
    for field in schema:
        yield from _within((field.name,), field)


def _within(path: tuple[str, ...], field: pa.Field) -> Iterator[tuple[tuple[str, ...], pa.Field]]:
    yield path, field
    kind = field.type
    if pa.types.is_map(kind):  # its keys are never null
        yield from _within((*path, "value"), kind.item_field)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_list_view(kind):
        yield from _within((*path, "element"), kind.value_field)
    elif pa.types.is_struct(kind):
        for inner in kind:
            yield from _within((*path, inner.name), inner)


def can_be_pasted(name: str) -> bool:
    """Return whether the name is printed as it is: Spark's SQL can't escape a character of a name.

    A control character is printed as a blank, which may be another name.
    """
    return printable(name) == name


def quoted(name: str) -> str:
    """Return the name quoted for Spark SQL; braces are doubled for `str.format`."""
    return f"`{name.replace('`', '``')}`".replace("{", "{{").replace("}", "}}")

"""Which features of a Delta table keep ingestd from writing to it.

A writer that does not know a feature must not write: what its commit lacks is missed by readers
that rely on it. A feature that is listed but not in use asks nothing of a writer. Source: Delta
protocol, "Table Features", "Requirements for Writers".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from ingestd.errors import FolderError

_FEATURES = 7
"""The writer version from which on a table lists its features."""
_BY_VERSION: Mapping[int, tuple[str, ...]] = {
    2: ("appendOnly", "invariants"),
    3: ("checkConstraints",),
    4: ("changeDataFeed", "generatedColumns"),
    5: ("columnMapping",),
    6: ("identityColumns",),
}
"""What each version before means, with those below it."""
_ASKS_NOTHING = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkpointProtection",
        "deletionVectors",
        "domainMetadata",
        "timestampNtz",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
"""Nothing of a commit that adds files, or exchanges files without a change of rows."""
MAPPING_MODE = "delta.columnMapping.mode"
FILES_BY_NAME = f"ALTER TABLE {{t}} SET TBLPROPERTIES ('{MAPPING_MODE}' = 'none')"
"""Has Spark write the files again, with the names that the columns have now."""


@dataclass(frozen=True, slots=True)
class TableTraits:
    """What a version of a table asks of its writers.

    `features`: as listed; of a writer version that lists none it is empty.
    """

    writer_version: int
    features: Collection[str]
    schema: pa.Schema
    configuration: Mapping[str, str]
    partitions: Collection[str] = ()

    @property
    def all_features(self) -> list[str]:
        """Return the features that are listed, or that the writer version stands for."""
        if self.writer_version >= _FEATURES:
            return sorted(self.features)
        versions = (v for v in _BY_VERSION if v <= self.writer_version)
        return [feature for version in versions for feature in _BY_VERSION[version]]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a table is not written to; `undo`: the statement for Spark, with ``{t}`` for the table.

    `undo` is empty where Spark can't take the feature away.
    """

    what: str
    undo: str = ""


class NotWritableError(FolderError):
    """The table uses a feature that ingestd does not write. `undo`: see Obstacle, of this table."""

    def __init__(self, uri: str, obstacle: Obstacle) -> None:
        path = uri.removeprefix("file://").rstrip("/")
        self.undo = obstacle.undo.format(t=f"delta.`{path}`")
        back = "put the folder back from a copy"
        super().__init__(
            f"lake table {uri}: {obstacle.what}, which ingestd does not write",
            remedy=f"in Spark: {self.undo}; or {back}" if self.undo else back,
        )


def find_obstacle(traits: TableTraits, *, removes_rows: bool = False) -> Obstacle | None:
    """Return what keeps ingestd from writing to such a table, None if nothing does.

    `removes_rows`: its commits do not only add rows.
    """
    if traits.partitions:
        return Obstacle(f"it is partitioned by {', '.join(traits.partitions)}")
    for feature in traits.all_features:
        if feature in _USES:
            found = _USES[feature](traits)
        elif feature in _ASKS_NOTHING:
            found = None
        else:
            found = Obstacle(f"it has the table feature {feature}", _UNDO.get(feature, ""))
        if found is None and removes_rows and feature in _OF_REMOVALS:
            found = _where_true(_OF_REMOVALS[feature])(traits)
        if found is not None:
            return found
    return None


def _mapping(traits: TableTraits) -> Obstacle | None:
    mode = traits.configuration.get(MAPPING_MODE, "none")
    return None if mode == "none" else Obstacle(f"it has column mapping ({mode})", FILES_BY_NAME)


def _constraints(traits: TableTraits) -> Obstacle | None:
    prefix = "delta.constraints."
    names = sorted(n.removeprefix(prefix) for n in traits.configuration if n.startswith(prefix))
    if not names:
        return None
    undo = f"ALTER TABLE {{t}} DROP CONSTRAINT {_quoted(names[0])}"
    return Obstacle(f"it has the CHECK constraint {names[0]}", undo)


def _invariants(traits: TableTraits) -> Obstacle | None:
    for path, field in _fields(traits.schema):
        name = ".".join(map(_quoted, path))
        if not field.nullable:
            undo = f"ALTER TABLE {{t}} ALTER COLUMN {name} DROP NOT NULL"
            return Obstacle(f"the column {'.'.join(path)} is NOT NULL", undo)
    return _where_field("delta.invariants", "has an invariant")(traits)


def _where_field(key: str, has: str, undo: str = "") -> Callable[[TableTraits], Obstacle | None]:
    """Return a check for columns with this metadata; `undo`: with ``{c}`` for the column."""

    def find(traits: TableTraits) -> Obstacle | None:
        for path, field in _fields(traits.schema):
            if key.encode() in (field.metadata or {}):
                column = ".".join(map(_quoted, path))
                return Obstacle(f"the column {'.'.join(path)} {has}", undo.replace("{c}", column))
        return None

    return find


def _where_true(name: str) -> Callable[[TableTraits], Obstacle | None]:
    """Return a check for a table property that is true."""

    def find(traits: TableTraits) -> Obstacle | None:
        if traits.configuration.get(name, "false").lower() != "true":
            return None
        return Obstacle(
            f"it has {name}", f"ALTER TABLE {{t}} SET TBLPROPERTIES ('{name}' = 'false')"
        )

    return find


_USES: Mapping[str, Callable[[TableTraits], Obstacle | None]] = {
    "allowColumnDefaults": _where_field(
        "CURRENT_DEFAULT", "has a default", "ALTER TABLE {t} ALTER COLUMN {c} DROP DEFAULT"
    ),
    "checkConstraints": _constraints,
    "columnMapping": _mapping,
    "generatedColumns": _where_field("delta.generationExpression", "is generated"),
    "icebergCompatV1": _where_true("delta.enableIcebergCompatV1"),
    "icebergCompatV2": _where_true("delta.enableIcebergCompatV2"),
    "identityColumns": _where_field("delta.identity.start", "is an identity column"),
    "inCommitTimestamp": _where_true("delta.enableInCommitTimestamps"),
    "invariants": _invariants,
    "typeWidening": _where_field("delta.typeChanges", "had another type before (typeWidening)"),
}
"""Features that ask something of a writer only where they are in use."""
_OF_REMOVALS = {"appendOnly": "delta.appendOnly", "changeDataFeed": "delta.enableChangeDataFeed"}
"""Features that ask something of a commit that removes rows where this property is true."""
_UNDO = {"rowTracking": "ALTER TABLE {t} DROP FEATURE rowTracking"}


def _fields(schema: pa.Schema) -> Iterator[tuple[tuple[str, ...], pa.Field]]:
    """Return each column, and each field inside one, with the names that lead to it."""
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


def _quoted(name: str) -> str:
    """Return the name as Spark's SQL has it; braces doubled, for `str.format`."""
    return f"`{name.replace('`', '``')}`".replace("{", "{{").replace("}", "}}")

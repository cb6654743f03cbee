"""Tables, columns and the Delta types that hold them.

Source of the Delta type names: Delta transaction log protocol, "Schema Serialization Format".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

import pyarrow as pa

ReplicaIdentity = Literal["d", "n", "f", "i"]
"""pg_class.relreplident: default (primary key), nothing, full, index."""

TIMESTAMP = pa.timestamp("us", tz="UTC")
"""timestamptz: Delta `timestamp`."""
TIMESTAMP_NTZ = pa.timestamp("us")
"""timestamp without time zone: Delta `timestamp_ntz`."""

_TABLE_TEXT = re.compile(r'(?:"((?:[^"]|"")+)"|([^".][^.]*))\.(.+)', re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class TableId:
    """A table's schema and name in the source, as they are there (not quoted).

    Its text is `schema.table`. Only a schema that has a dot or begins with a quote is quoted, as
    SQL does it, so that no two tables have the same text: ``"s.x".y`` is not ``s.x.y``, which is
    the table ``x.y`` of ``s``. The table's name is the rest of the text, never quoted.
    """

    schema: str
    name: str

    def __str__(self) -> str:
        quoted = "." in self.schema or self.schema.startswith('"')
        schema = '"' + self.schema.replace('"', '""') + '"' if quoted else self.schema
        return f"{schema}.{self.name}"

    @classmethod
    def parse(cls, text: str) -> TableId:
        """Read what `str` writes, or the same with a quoted schema. Raises ValueError."""
        found = _TABLE_TEXT.fullmatch(text)
        if found is None:
            msg = f"{text!r} is not `schema.table` (a schema with a dot is quoted, as in SQL)"
            raise ValueError(msg)
        quoted, plain, name = found.groups()
        return cls(plain if quoted is None else quoted.replace('""', '"'), name)


@dataclass(frozen=True, slots=True)
class Mask:
    """How a column's values are hidden: ``sha256`` keyed with `key` (HMAC, hex), or ``null``."""

    kind: Literal["sha256", "null"]
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a source table, and the lake's column that takes its values.

    `name` is the source's. `type` is the Arrow type of the lake's column. `pg_type` is the type as
    format_type() writes it (``numeric(12,2)``); empty where only a RELATION message told of the
    column. `identity` says that the column belongs to the replica identity. `missing` is the text
    that rows written before the column existed have in the source (pg_attribute.attmissingval),
    None if none; `unread_bytes`: its size if it is too large to be read. `stored_as` is the lake
    column's name where it is not the source's: another type than before (``name__v2``), or a name
    that differs from another only by case. `is_override` says that the config chose `type`: a
    decimal then takes whatever number it holds exactly, however it is written. `mask` hides the
    values.
    """

    name: str
    type_oid: int
    typmod: int
    type: pa.DataType
    pg_type: str = ""
    identity: bool = False
    nullable: bool = True
    comment: str | None = None
    missing: str | None = None
    unread_bytes: int = 0
    stored_as: str | None = None
    is_override: bool = False
    mask: Mask | None = None

    @property
    def lake_name(self) -> str:
        """Name of the lake's column: in the raw table, `_cdc_before`, `_cdc_raw`, `_tables`."""
        return self.name if self.stored_as is None else self.stored_as


@dataclass(frozen=True, slots=True)
class Table:
    """A source table at one version of its schema: the columns that are captured.

    `columns` are in the source's order. `key` names the primary key's columns, in key order, empty
    without one. `before` names the columns of `_cdc_before`, in column order, never empty unless
    the table has no columns. (Both by the source's names.) `row_filter` is the publication's, as
    SQL. `storage` names the files that hold the rows (and for partitions, which): other rows
    may be there without an event only if it has changed; empty where it is not known.
    """

    id: TableId
    oid: int
    columns: tuple[Column, ...]
    replica_identity: ReplicaIdentity = "d"
    key: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    row_filter: str | None = None
    storage: str = ""

    def column(self, name: str) -> Column:
        """Return the column of that name. Raises KeyError."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    @property
    def before_columns(self) -> tuple[Column, ...]:
        """The columns of `_cdc_before`, in their order."""
        names = set(self.before)
        return tuple(c for c in self.columns if c.name in names)

    @property
    def captured_key(self) -> tuple[str, ...]:
        """The primary key, if all its columns are captured: else it does not tell rows apart."""
        names = {c.name for c in self.columns}
        return self.key if names.issuperset(self.key) else ()

    @property
    def identity(self) -> tuple[str, ...]:
        """Names of the replica identity's columns, in column order."""
        return tuple(c.name for c in self.columns if c.identity)

    @property
    def identifying(self) -> tuple[str, ...]:
        """Names of the columns by which a change finds its row; empty where rows are a multiset."""
        return self.key if self.replica_identity == "f" else self.identity


def with_before(table: Table, *, full: bool) -> Table:
    """Return the table with `before` decided: which columns `_cdc_before` has (design section 2).

    The identity columns by default. With REPLICA IDENTITY FULL the server sends whole old rows:
    kept whole when asked for (`full`) or when there is no key to go by, else cut to the primary
    key. A table without any identity has nothing to send; its struct (Delta has no empty struct)
    has all columns and is never set.
    """
    every = tuple(c.name for c in table.columns)
    if table.replica_identity == "f":
        names = every if full or not table.key else tuple(n for n in every if n in table.key)
    else:
        names = table.identity or every
    return replace(table, before=names)


def in_name_order(arrow: pa.DataType) -> pa.DataType:
    """Return the type with its structs' fields in the order of their names, at any depth."""
    if pa.types.is_list(arrow):
        return pa.list_(arrow.value_field.with_type(in_name_order(arrow.value_type)))
    if pa.types.is_struct(arrow):
        fields = [f.with_type(in_name_order(f.type)) for f in arrow]
        return pa.struct(sorted(fields, key=lambda f: f.name))
    return arrow


def delta_type(arrow: pa.DataType) -> str:
    """Name the Delta type of an Arrow type that a raw table can have. Raises TypeError."""
    simple = _DELTA_NAMES.get(arrow)
    if simple is not None:
        return simple
    if pa.types.is_decimal128(arrow):
        return f"decimal({arrow.precision},{arrow.scale})"
    if pa.types.is_list(arrow):
        return f"array<{delta_type(arrow.value_type)}>"
    if pa.types.is_map(arrow):
        return f"map<{delta_type(arrow.key_type)},{delta_type(arrow.item_type)}>"
    if pa.types.is_struct(arrow):
        return "struct<" + ",".join(f"{f.name}:{delta_type(f.type)}" for f in arrow) + ">"
    msg = f"no Delta type for {arrow}"
    raise TypeError(msg)


_DELTA_NAMES = {
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
    TIMESTAMP: "timestamp",
    TIMESTAMP_NTZ: "timestamp_ntz",
}

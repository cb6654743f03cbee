"""Tables, columns and the lake types that hold them.

Source of the names of lake types: Delta transaction log protocol, "Schema Serialization Format".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

import pyarrow as pa

ReplicaIdentity = Literal["d", "n", "f", "i"]
"""pg_class.relreplident: default (primary key), nothing, full, index."""

TIMESTAMP = pa.timestamp("us", tz="UTC")
"""timestamptz: lake type `timestamp`."""
TIMESTAMP_NTZ = pa.timestamp("us")
"""timestamp without time zone: lake type `timestamp_ntz`."""

_TABLE_TEXT = re.compile(r'(?:"((?:[^"]|"")+)"|([^".][^.]*))\.(.+)', re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class TableId:
    """A table's schema and name in the source, as stored there (not quoted).

    Its text is `schema.table`. Only a schema that has a dot or begins with a quote is quoted, as in
    SQL, so that no two tables have the same text: ``"s.x".y`` is not ``s.x.y``, which is the table
    ``x.y`` of ``s``. The table's name is the rest of the text, never quoted.
    """

    schema: str
    name: str

    def __str__(self) -> str:
        quoted = "." in self.schema or self.schema.startswith('"')
        schema = '"' + self.schema.replace('"', '""') + '"' if quoted else self.schema
        return f"{schema}.{self.name}"

    @classmethod
    def parse(cls, text: str) -> TableId:
        """Parse the output of `str`, or the same with a quoted schema. Raises ValueError."""
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
    """One column of a source table, and the lake column that stores its values.

    `name` is the source's. `type` is the Arrow type of the lake's column. `pg_type` is the type as
    format_type() writes it (``numeric(12,2)``); empty if only a RELATION message described the
    column. `identity` is True for a column of the replica identity. `missing` is the text that rows
    written before the column existed have in the source (pg_attribute.attmissingval), None if none;
    `unread`: why it can't be read. `stored_as` is the lake column's name if it differs from the
    source's: the type has changed (``name__v2``), or another name differs only by case.
    `is_override` is True if the config chose `type`: a decimal then accepts any number it holds
    exactly, however it is written. `mask` hides the values.
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
    unread: str = ""
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
    SQL. `fingerprint` identifies the files that hold the rows (and for partitions, which ones):
    rows can be replaced without a change event only if it has changed; empty if unknown.
    """

    id: TableId
    oid: int
    columns: tuple[Column, ...]
    replica_identity: ReplicaIdentity = "d"
    key: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    row_filter: str | None = None
    fingerprint: str = ""

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
        """The primary key if all its columns are captured; otherwise it does not identify rows."""
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
    """Return the table with `before` set: the columns of `_cdc_before` (design section 2).

    The identity columns by default. With REPLICA IDENTITY FULL the server sends complete old rows:
    all columns are kept on request (`full`) or if there is no primary key, otherwise only the key.
    A table without any identity sends no old row; its struct (Delta has no empty struct) has all
    columns and is always null.
    """
    every = tuple(c.name for c in table.columns)
    if table.replica_identity == "f":
        names = every if full or not table.key else tuple(n for n in every if n in table.key)
    else:
        names = table.identity or every
    return replace(table, before=names)


def in_name_order(arrow: pa.DataType) -> pa.DataType:
    """Return the type with its structs' fields sorted by name, at any depth."""
    if pa.types.is_list(arrow):
        return pa.list_(arrow.value_field.with_type(in_name_order(arrow.value_type)))
    if pa.types.is_struct(arrow):
        fields = [f.with_type(in_name_order(f.type)) for f in arrow]
        return pa.struct(sorted(fields, key=lambda f: f.name))
    return arrow


def lake_type_name(arrow: pa.DataType) -> str:
    """Return the name of the lake type for an Arrow type of a raw table. Raises TypeError.

    It is a part of Spark's DDL: fields whose names are not plain, which are a composite type's
    attributes, are quoted.
    """
    simple = _TYPE_NAMES.get(arrow)
    if simple is not None:
        return simple
    if pa.types.is_decimal128(arrow):
        return f"decimal({arrow.precision},{arrow.scale})"
    if pa.types.is_list(arrow):
        return f"array<{lake_type_name(arrow.value_type)}>"
    if pa.types.is_map(arrow):
        return f"map<{lake_type_name(arrow.key_type)},{lake_type_name(arrow.item_type)}>"
    if pa.types.is_struct(arrow):
        return (
            "struct<" + ",".join(f"{_field(f.name)}:{lake_type_name(f.type)}" for f in arrow) + ">"
        )
    msg = f"no Delta type for {arrow}"
    raise TypeError(msg)


def _field(name: str) -> str:
    return name if _PLAIN_FIELD.match(name) else "`" + name.replace("`", "``") + "`"


_PLAIN_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

_TYPE_NAMES = {
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

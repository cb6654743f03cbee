"""The columns of a history, and those that identify its rows.

Names that begin with `_cdc_` are free for use inside a plan: no source column has one
(docs/names.md). The columns that a history adds are named `_cdc_valid_from`, ... inside plans. In
the table they are named `valid_from`, ..., unless the source has such a name itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql import functions as f
from pyspark.sql import types as t

from ingestd.decode.lake_columns import column_name
from ingestd.model.changes import RESERVED_PREFIX
from spark_jobs.delta_log.statements import literal
from spark_jobs.lake.columns import RAW, VARIANT, named
from spark_jobs.lake.missing_values import missing_value
from spark_jobs.lake.variants import variant_names

if TYPE_CHECKING:
    from pyspark.sql import Column

    from ingestd.lake.definitions import Definition, LakeColumn

ADDED: Mapping[str, str] = {
    "valid_from": "timestamp",
    "valid_to": "timestamp",
    "is_current": "boolean",
    "operation": "string",
    "valid_from_lsn": "bigint",
    "valid_from_seq": "bigint",
    "valid_to_lsn": "bigint",
    "valid_to_seq": "bigint",
}
"""Columns of a history besides the source's, `_cdc_raw` and `_cdc_unchanged`."""

UNCHANGED = "_cdc_unchanged"
LSN = "_cdc_lsn"

_EXACT = (t.ByteType, t.ShortType, t.IntegerType, t.LongType, t.BooleanType)
"""Types that represent all of their source values, so that none is ever in `_cdc_raw`."""
_NESTED = (t.ArrayType, t.StructType)


def is_clashing(columns: Sequence[str]) -> bool:
    """Return whether a source column has the name of an added one. Case does not count."""
    return not {name.lower() for name in columns}.isdisjoint(ADDED)


@dataclass(frozen=True, slots=True)
class HistoryShape:
    """A table's columns.

    `types`: every source column of the raw table. `versions`: for each identifying column, the
    lake columns that have had its values, the present one first. `present`: columns that the
    source has now. `is_keyed`: if not, all columns together identify a row. `lives`: each period
    in which one of `types` received values. `variants`: columns that the history has as VARIANT;
    in `types` they are strings, as in a step.
    """

    types: Mapping[str, t.DataType]
    present: tuple[LakeColumn, ...]
    versions: tuple[tuple[str, ...], ...]
    is_keyed: bool
    lives: tuple[LakeColumn, ...] = ()
    variants: tuple[str, ...] = ()

    @classmethod
    def from_schema(cls, raw: t.StructType, definition: Definition) -> HistoryShape:
        """Return the shape of a table. `raw`: the raw table's schema."""
        types = {c.name: c.dataType for c in raw if not c.name.startswith(RESERVED_PREFIX)}
        present = tuple(c for c in definition.columns if c.name in types)
        lives = tuple(c for c in definition.lives if c.name in types)
        key = set(definition.key)
        versions: list[tuple[str, ...]] = [(c.name,) for c in present]
        if key:
            others = set(types).difference(c.name for c in present)
            versions = [(c.name, *_earlier(c, others)) for c in present if c.name in key]
        return cls(types, present, tuple(versions), bool(key), lives, tuple(variant_names(lives)))

    @property
    def stored_types(self) -> dict[str, str]:
        """The types of the columns in the history."""
        found = {name: kind.simpleString() for name, kind in self.types.items()}
        return found | dict.fromkeys(self.variants, VARIANT)

    @property
    def added(self) -> list[LakeColumn]:
        """Columns first added, with a constant, at a time when the table may have had rows."""
        return [c for c in self.lives if c.since_lsn and not c.is_again and c.missing is not None]

    @property
    def made_again(self) -> list[int]:
        """The positions at which dropped columns were re-created, in order."""
        return sorted({c.since_lsn for c in self.lives if c.is_again})

    def made_at(self, lsn: int) -> list[LakeColumn]:
        """Return the columns that were created or re-created at a position."""
        return [c for c in self.lives if c.since_lsn == lsn and c.has_values_at(lsn)]

    def without_values_at(self, lsn: int) -> list[str]:
        """Return the names of columns that have no values in rows written at a position."""
        there = {c.name for c in self.lives if c.has_values_at(lsn)}
        known = {c.name for c in self.lives}
        return [name for name in self.types if name in known - there]

    @property
    def columns(self) -> list[str]:
        """Names of all source columns."""
        return list(self.types)

    @property
    def part_names(self) -> list[str]:
        """The names of `parts` in a plan."""
        nested = sum(
            isinstance(self.types[names[0]], _NESTED) for names in self.versions if len(names) == 1
        )
        return [f"_cdc_k{i}" for i in range(len(self.versions) + nested)]

    @property
    def key(self) -> list[LakeColumn]:
        """The present key columns, which identify rows in changes; empty without a key."""
        names = {found[0] for found in self.versions} if self.is_keyed else set()
        return [c for c in self.present if c.name in names]

    def parts(
        self, *, struct: str | None = None, prefix: str = "", of: str | None = None, lsn: str = LSN
    ) -> list[str]:
        """Return the values that identify a row, as SQL, in types that Spark can compare and group.

        Null equals null here. `struct`: a column to use instead of the row; `prefix`: of its names
        in `_cdc_raw`. `of`: the alias of the history, if the row is in it. `lsn`: the column with
        the row's position. In a row from below the position where a column was added, the column
        has the source's value for such rows, whatever is stored.
        """
        raw, lsns = named(RAW, of), named(lsn, of)
        added = {c.name: (c.since_lsn, *missing_value(c)) for c in self.present if c.since_lsn}

        in_row = partial(self._in_history, of=of) if of else named

        def value(name: str) -> str:
            own = in_row(name) if struct is None else named(name, named(struct, of))
            if name not in added:
                return own
            since, missing, _ = added[name]
            return f"CASE WHEN {lsns} < {since} THEN {missing} ELSE {own} END"

        def kept(name: str) -> str:
            own = f"try_element_at({raw}, {literal(prefix + name)})"
            if name not in added:
                return own
            since, _, missing = added[name]
            return f"CASE WHEN {lsns} < {since} THEN {literal(missing)} ELSE {own} END"

        def text(name: str) -> str:
            return f"coalesce({kept(name)}, CAST({value(name)} AS string))"

        found: list[str] = []
        for names in self.versions:
            kind = self.types[names[0]]
            if len(names) > 1:
                found.append(f"coalesce({', '.join(map(text, names))})")
            elif isinstance(kind, _EXACT):
                found.append(value(names[0]))
            elif isinstance(kind, _NESTED):
                found.append(value(names[0]))
                found.append(kept(names[0]))
            else:
                found.append(text(names[0]))
        return found

    def _in_history(self, name: str, of: str) -> str:
        own = named(name, of)
        return f"to_json({own})" if name in self.variants else own

    def named_parts(self, *, struct: str | None = None, prefix: str = "") -> list[Column]:
        """Return `parts` with their names."""
        parts = self.parts(struct=struct, prefix=prefix)
        return [f.expr(part).alias(f"_cdc_k{i}") for i, part in enumerate(parts)]


def _earlier(column: LakeColumn, others: set[str]) -> list[str]:
    """Return the lake columns that a source column had before its present one, newest first."""
    own = re.compile(re.escape(column_name(column.source_name)) + r"(?:__v(\d+))?")
    found = {n: int(m[1] or 1) for n in others if (m := own.fullmatch(n)) is not None}
    return sorted(found, key=lambda n: -found[n])


def position(lsn: str = "_cdc_lsn", seq: str = "_cdc_seq") -> Column:
    """Return a position as a comparable column."""
    return f.struct(f.col(lsn).alias("lsn"), f.col(seq).alias("seq"))


def literal_position(lsn: int, seq: int) -> Column:
    """Return a constant position."""
    return f.struct(f.lit(lsn).cast("long").alias("lsn"), f.lit(seq).cast("long").alias("seq"))

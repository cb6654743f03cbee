"""Which lake column takes a source column's values (design sections 2 and 8.5).

A lake column is never renamed, never gets another type, and never changes its owner: the source
column it was made for, by name. So the choice depends only on the source's columns and on what the
lake has, and is the same whenever it is made again.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import pyarrow as pa

from ingestd.model.changes import RESERVED_PREFIX
from ingestd.model.schema import delta_type

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ingestd.model.lake_state import RegisteredColumn
    from ingestd.model.schema import Column

_INTEGERS = {"short": pa.int16(), "integer": pa.int32(), "long": pa.int64()}
"""Delta's integers, narrow to wide: the wider one has every value's text of the narrower."""


def column_name(source_name: str) -> str:
    """Return the name that a source column would have in the lake if no other had it.

    That is its own name, whatever characters are in it: measured, deltalake 1.6 and Spark 4.2 with
    Delta 4.4 read them all, in batches and as a stream. (Space, comma, semicolon, braces,
    parentheses, newline, tab and the equals sign, which Delta wants column mapping for, are only
    refused where Spark writes.) Names that would be taken for a `_cdc_` column, in any case, get
    their first letter mapped as in a path (design section 2).
    """
    if folded(source_name).startswith(RESERVED_PREFIX):
        return f"_x{ord(source_name[0]):04X}_{source_name[1:]}"
    return source_name


def folded(name: str) -> str:
    """Return what names that differ only by case have in common.

    As coarse as what any reader compares by. Delta takes lower-case names; Spark, for fields of
    structs and in MERGE, takes characters for equal whose capitals are (measured; Java's
    equalsIgnoreCase): the dotless i is an i, both small sigmas are one.
    """
    return name.upper().casefold().replace("i\u0307", "i")


def allocate(
    columns: Sequence[Column], known: Mapping[str, RegisteredColumn]
) -> tuple[Column, ...]:
    """Decide each column's `stored_as`; give the columns in the same order.

    `known`: every column that the table's raw table ever had, by its name there
    (`RegisteredTable.lake_columns`). A source column goes on with its own lake column of the wanted
    type, whichever version that is, or of a wider integer type, which then becomes the column's
    type. Otherwise it gets the first free name of ``name``, ``name__v2``, ``name__v3``, ... Free
    is a name that, compared without case, no lake column has and no other source column: of two
    new columns whose names differ only by case, the first in the source's order gets its own.
    """
    own: dict[str, dict[str, str]] = {}
    for name, entry in known.items():
        own.setdefault(entry.source_name, {})[entry.delta_type] = name
    settled = {c.name: _kept(c, own.get(c.name, {})) for c in columns}
    waiting = [c for c in columns if settled[c.name] is None]
    taken = {folded(name) for name in known}
    for column in sorted(waiting, key=lambda c: column_name(c.name) != c.name):
        if folded(column_name(column.name)) not in taken:
            settled[column.name] = _stored(column, column_name(column.name))
            taken.add(folded(column_name(column.name)))
    taken |= {folded(column_name(c.name)) for c in columns}
    for column in waiting:
        if settled[column.name] is None:
            name = next(_free(column, taken))
            settled[column.name] = _stored(column, name)
            taken.add(folded(name))
    return tuple(c for c in settled.values() if c is not None)


def _kept(column: Column, own: Mapping[str, str]) -> Column | None:
    """Return the column with the one of its `own` lake columns, by Delta type, that holds it."""
    wanted = delta_type(column.type)
    if wanted in own:
        return _stored(column, own[wanted])
    if wanted in _INTEGERS:
        for wider in list(_INTEGERS)[list(_INTEGERS).index(wanted) :]:
            if wider in own:
                return replace(_stored(column, own[wider]), type=_INTEGERS[wider])
    return None


def _stored(column: Column, name: str) -> Column:
    return replace(column, stored_as=None if name == column.name else name)


def _free(column: Column, taken: Collection[str]) -> Iterator[str]:
    base = column_name(column.name)
    return (n for v in count(2) if folded(n := f"{base}__v{v}") not in taken)

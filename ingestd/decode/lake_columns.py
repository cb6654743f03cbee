"""Assignment of source columns to lake columns (design sections 2 and 8.5).

A lake column never changes its name, its type or its owner, the source column (by name) for which
it was created. So the assignment depends only on the source's columns and on the lake's, and is
repeatable.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import pyarrow as pa

from ingestd.model.changes import RESERVED_PREFIX
from ingestd.model.schema import lake_type_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ingestd.model.lake_state import RegisteredColumn
    from ingestd.model.schema import Column

_INTEGERS = {"short": pa.int16(), "integer": pa.int32(), "long": pa.int64()}
"""Delta's integers, narrow to wide. A wider one holds all values of a narrower one."""


def column_name(source_name: str) -> str:
    """Return the preferred lake name of a source column.

    That is its own name, whatever characters are in it. deltalake 1.6 and Spark 4.2 with Delta 4.4
    were measured to read them all, in batches and as a stream. (Only writes by Spark refuse space,
    comma, semicolon, braces, parentheses, newline, tab and the equals sign, for which Delta wants
    column mapping.) In names that look like a `_cdc_` column, in any case, the first letter is
    mapped as in a path (design section 2).
    """
    if folded(source_name).startswith(RESERVED_PREFIX):
        return f"_x{ord(source_name[0]):04X}_{source_name[1:]}"
    return source_name


def folded(name: str) -> str:
    """Return the common form of names that differ only by case.

    It is as coarse as the comparison of any reader. Delta compares lower-case names; Spark, for
    fields of structs and in MERGE, treats characters as equal if their capitals are (measured;
    Java's equalsIgnoreCase): the dotless i is an i, both small sigmas are one.
    """
    return name.upper().casefold().replace("i\u0307", "i")


def allocate(
    columns: Sequence[Column], known: Mapping[str, RegisteredColumn]
) -> tuple[Column, ...]:
    """Set each column's `stored_as`; return the columns in the same order.

    `known`: every column that the table's raw table ever had, by its name there
    (`RegisteredTable.lake_columns`). A source column keeps its own lake column of the wanted type,
    whichever version that is, or of a wider integer type, which then becomes the column's type.
    Otherwise it gets the first free name of ``name``, ``name__v2``, ``name__v3``, ... A name is
    free if, compared without case, it is neither a lake column's nor another source column's. Of
    two new columns whose names differ only by case, the first in the source's order gets its own.
    """
    own: dict[str, dict[str, str]] = {}
    for name, entry in known.items():
        own.setdefault(entry.source_name, {})[entry.lake_type] = name
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
    """Return the column assigned to one of its `own` lake columns (by lake type), if one fits."""
    wanted = lake_type_name(column.type)
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

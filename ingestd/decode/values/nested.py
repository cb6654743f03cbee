"""Casts of arrays to lists and of composite values to structs, based on the casts of elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.decode.values.array_text import ARRAY, RECORD, elements_of
from ingestd.decode.values.text_column import TextColumn, bitmap

Flags = NDArray[np.bool_]
Rows = NDArray[np.int64]
Cast = Callable[[TextColumn, pa.DataType], tuple[pa.Array, Rows]]
"""Casts the elements: see `ingestd.decode.values.cast.cast`."""

_PIECE_BYTES = 1 << 18
"""Texts are parsed in pieces of this size. The intermediate data takes several times as much
memory, and so fits the processor's cache."""


def lists(texts: TextColumn, to: pa.ListType, cast: Cast) -> tuple[pa.Array, Flags]:
    """Cast texts of arrays. A value with an element that its type can't hold is refused."""
    return _in_pieces(texts, to, cast, _lists)


def structs(texts: TextColumn, to: pa.StructType, cast: Cast) -> tuple[pa.Array, Flags]:
    """Cast texts of composite values: a null is a null struct, ``(,)`` a struct of nulls.

    A value with another number of fields (the type has been altered) is refused.
    """
    return _in_pieces(texts, to, cast, _structs)


def _in_pieces(
    texts: TextColumn,
    to: pa.DataType,
    cast: Cast,
    take_apart: Callable[[TextColumn, pa.DataType, Cast], tuple[pa.Array, Flags]],
) -> tuple[pa.Array, Flags]:
    found = [take_apart(piece, to, cast) for piece in _pieces(texts)]
    if len(found) == 1:
        return found[0]
    return pa.concat_arrays([a for a, _ in found]), np.concatenate([r for _, r in found])


def _pieces(texts: TextColumn) -> Iterator[TextColumn]:
    reached = np.cumsum(texts.lengths)
    start = 0
    while start < len(texts):
        before = int(reached[start - 1]) if start else 0
        end = int(np.searchsorted(reached, before + _PIECE_BYTES))
        end = max(end, start + 1)
        yield texts if end - start == len(texts) else texts[slice(start, end)]
        start = end


def _lists(texts: TextColumn, to: pa.ListType, cast: Cast) -> tuple[pa.Array, Flags]:
    elements = elements_of(texts, ARRAY)
    refused, counts = elements.refused, elements.counts
    values, odd = cast(elements.texts, to.value_type)
    if len(odd):
        row = np.repeat(np.arange(len(texts)), counts)
        refused[row[odd]] = True
        values = values.filter(pa.array(~refused[row]))
        counts = np.where(refused, 0, counts)
    offsets = np.zeros(len(texts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    buffers = [_validity(texts, refused), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(to, len(texts), buffers, children=[values]), refused


def _structs(texts: TextColumn, to: pa.StructType, cast: Cast) -> tuple[pa.Array, Flags]:
    elements = elements_of(texts, RECORD)
    refused, counts, found = elements.refused, elements.counts, elements.texts
    width = to.num_fields
    good = counts == width
    is_absent = refused if texts.present is None else refused | ~texts.present
    refused |= ~good & ~is_absent
    if (counts[~good] > 0).any():
        found = found[np.flatnonzero(np.repeat(good, counts))]
    rows = np.flatnonzero(good)
    children = []
    for i, field in enumerate(to):
        array, odd = cast(found[slice(i, None, width)], field.type)
        refused[rows[odd]] = True
        children.append(array)
    if len(rows) < len(texts):
        index = np.zeros(len(texts), np.int64)
        index[rows] = np.arange(len(rows))
        places = pa.array(index, mask=~good)
        children = [c.take(places) for c in children]
    buffers = [_validity(texts, refused)]
    return pa.Array.from_buffers(to, len(texts), buffers, children=children), refused


def _validity(texts: TextColumn, refused: Flags) -> pa.Buffer | None:
    there = ~refused if texts.present is None else texts.present & ~refused
    return None if there.all() else bitmap(there)

"""Columns of one or several tables cast together.

A cast takes a fifth of a millisecond, however few values it has. If many tables have a few rows
each, their columns of one type are cast as one column here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.decode.change_batch import CastColumn, Tuples
from ingestd.decode.values.cast import cast
from ingestd.decode.values.text_column import TextColumn
from ingestd.model.schema import Column

Wanted = tuple[Tuples, Iterable[Column]]
"""Walked tuples, and the columns to cast in them."""

_Member = tuple[int, str, TextColumn]
"""Index of the tuples, name of the column, its values."""


def cast_batched(wanted: Sequence[Wanted]) -> list[Tuples]:
    """Return the tuples with cast values for these columns. All have the same source.

    Masked columns are skipped; the row builder handles them.
    """
    groups: dict[tuple[pa.DataType, bool], list[_Member]] = {}
    for index, (tuples, columns) in enumerate(wanted):
        for column in columns:
            walked = tuples.fields.get(column.name)
            if walked is not None and column.mask is None:
                group = groups.setdefault((column.type, column.is_override), [])
                group.append((index, column.name, walked.texts))
    found = [dict(tuples.values) for tuples, _ in wanted]
    for (to, is_override), members in groups.items():
        casts = _cast([texts for *_, texts in members], to, is_override=is_override)
        for (index, name, _), values in zip(members, casts, strict=True):
            found[index][name] = values
    return [
        replace(tuples, values=values) for (tuples, _), values in zip(wanted, found, strict=True)
    ]


def _cast(parts: Sequence[TextColumn], to: pa.DataType, *, is_override: bool) -> list[CastColumn]:
    """Cast the parts as one column, and return each part's result.

    The values are cast in source order, because their start offsets must ascend.
    """
    if len(parts) == 1:
        array, refused = cast(parts[0], to, is_override=is_override)
        return [CastColumn(array, refused, parts[0][refused])]
    texts, bounds = _joined(parts)
    order = np.argsort(texts.starts, kind="stable")
    array, refused = cast(texts[order], to, is_override=is_override)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    array = array.take(pa.array(rank))
    refused = np.sort(order[refused])
    cuts = np.searchsorted(refused, bounds).tolist()
    # Each gets its own copy: shared memory would only be freed once all of them are written.
    found = []
    for i, (start, end) in enumerate(pairwise(bounds.tolist())):
        own = refused[cuts[i] : cuts[i + 1]] - start
        values = pa.concat_arrays([array.slice(start, end - start)])
        found.append(CastColumn(values, own, parts[i][own]))
    return found


def _joined(parts: Sequence[TextColumn]) -> tuple[TextColumn, NDArray[np.int64]]:
    """Return all values in sequence, and the bounds of the parts."""
    present = heads = None
    if any(part.present is not None for part in parts):
        present = np.concatenate(
            [np.ones(len(p), np.bool_) if p.present is None else p.present for p in parts]
        )
    known = [part.heads for part in parts if part.heads is not None]
    if len(known) == len(parts):
        heads = np.concatenate(known)
    starts = np.concatenate([part.starts for part in parts])
    lengths = np.concatenate([part.lengths for part in parts])
    bounds = np.cumsum([0, *(len(part) for part in parts)])
    return TextColumn(parts[0].source, starts, lengths, present, heads), bounds

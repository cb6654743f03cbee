"""The values that rows keep under an old key, from before their key changed: from the mirror."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as f

from ingestd.lake.fold.outcomes import FoldedChanges, SourceText, keys_of
from spark_jobs.lake.columns import RAW, col, same_key
from spark_jobs.lake.exchange import from_arrow, to_arrow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from ingestd.lake.definitions import LakeColumn
    from ingestd.lake.fold.outcomes import FoldKey


def fill_kept(
    folded: FoldedChanges, mirror: Callable[[], DataFrame], key: Sequence[LakeColumn]
) -> pa.Table:
    """Return the outcomes, completed with the values kept under old keys in the mirror.

    `mirror` returns its rows. Two Spark jobs, none if there are no such values. A value of a row
    that the mirror does not have is null.
    """
    outcomes = folded.outcomes
    if not folded.kept_under_old_key:
        return outcomes
    wanted = sorted({name for _, name, _ in folded.kept_under_old_key})
    found = _rows_of(
        {whose for _, _, whose in folded.kept_under_old_key}, outcomes, mirror(), key, wanted
    )
    row_of = {whose: i for i, whose in enumerate(keys_of(found, [k.name for k in key]))}
    for name in wanted:
        rows = {n: row_of[k] for n, c, k in folded.kept_under_old_key if c == name and k in row_of}
        outcomes = _replaced(outcomes, name, found[name], rows)
    return _with_texts(outcomes, folded, found, row_of)


def _rows_of(
    keys: set[FoldKey],
    like: pa.Table,
    mirror: DataFrame,
    key: Sequence[LakeColumn],
    wanted: Sequence[str],
) -> pa.Table:
    """Return the mirror's rows of these keys."""
    every = list(keys)
    texts = [[_raw_text(k[n]) for n in range(len(key))] for k in every]
    columns = {
        k.name: pa.array(
            [None if texts[i][n] is not None else _plain(every[i][n]) for i in range(len(every))],
            like.schema.field(k.name).type,
        )
        for n, k in enumerate(key)
    }
    raw = [
        [(k.name, t) for k, t in zip(key, texts[i], strict=True) if t is not None] or None
        for i in range(len(every))
    ]
    columns[RAW] = pa.array(raw, pa.map_(pa.string(), pa.string()))
    local = from_arrow(mirror.sparkSession, pa.table(columns))
    names = dict.fromkeys([*(k.name for k in key), *wanted, RAW])
    rows = (
        mirror.select(*[col(name) for name in names])
        .alias("t")
        .join(f.broadcast(local.alias("s")), f.expr(same_key(key, "t", "s")), "left_semi")
    )
    return to_arrow(rows).combine_chunks()


def _raw_text(value: object) -> str | None:
    return value.text if isinstance(value, SourceText) else None


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _replaced(
    outcomes: pa.Table, name: str, values: pa.ChunkedArray, rows: dict[int, int]
) -> pa.Table:
    """Return the outcomes with other values in a column. `rows`: outcome to index in `values`."""
    own = outcomes[name].combine_chunks()
    joined = pa.concat_arrays([*_chunks(own), *_chunks(values.cast(own.type))])
    count = outcomes.num_rows
    indices = [count + rows[i] if i in rows else i for i in range(count)]
    index = outcomes.schema.get_field_index(name)
    return outcomes.set_column(index, name, joined.take(pa.array(indices, pa.int64())))


def _chunks(values: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
    return values.chunks if isinstance(values, pa.ChunkedArray) else [values]


def _with_texts(
    outcomes: pa.Table, folded: FoldedChanges, rows: pa.Table, row_of: dict[FoldKey, int]
) -> pa.Table:
    """Return the outcomes with the texts of kept values that their columns can't represent."""
    raws = rows[RAW].to_pylist()
    texts = {
        (number, name): dict(raws[row_of[whose]] or ())[name]
        for number, name, whose in folded.kept_under_old_key
        if whose in row_of and name in dict(raws[row_of[whose]] or ())
    }
    if not texts:
        return outcomes
    own = [dict(pairs or ()) for pairs in outcomes[RAW].to_pylist()]
    for (number, name), text in texts.items():
        own[number][name] = text
    column = pa.array(
        [sorted(pairs.items()) or None for pairs in own], outcomes.schema.field(RAW).type
    )
    return outcomes.set_column(outcomes.schema.get_field_index(RAW), RAW, column)

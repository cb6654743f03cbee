"""The changes of a table: of some epochs, or of one row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.digests.value_hashes import HashBlocks
from ingestd.lake.fold.outcomes import DELETED
from ingestd.lake.fold.vectorized import above_truncate, fold_to_outcomes
from ingestd.lake.reference.raw_changes import key_hashes
from ingestd.lake.store.store import Store
from ingestd.lake.verify.change_digests import reached
from ingestd.model.changes import OF_BEFORE, TRUNCATE
from ingestd.model.errors import ConfigError, did_you_mean
from ingestd.model.schema import TableId
from ingestd.reading.cut import SourceCut
from ingestd.reading.output_columns import (
    CHANGE_FIELDS,
    ORIGIN_FIELDS,
    RowShape,
    output_columns,
)
from ingestd.reading.raw_files import BEGINNING, RawFiles, old_keys

_POSITION = ("_cdc_lsn", "_cdc_seq")


class ChangeRows:
    """The changes of a table from above an epoch up to a cut. Blocks.

    Columns have the names that they have at the cut. Raise ConfigError for an unknown table.
    """

    def __init__(self, store: Store, cut: SourceCut, table: TableId, after: int = 0) -> None:
        definition = cut.known(table)
        columns = output_columns(definition, merge_versions=True)
        self._cut, self._table, self._after = cut, table, after
        self._key = tuple(c.name for c in columns if c.newest in definition.key)
        self._files = RawFiles(store, cut.records.source, table, cut.epoch, after)
        fields = {**CHANGE_FIELDS, **ORIGIN_FIELDS}
        names = frozenset(c.name for c in columns)
        self._shape = RowShape(columns, self._key, names, fields)

    @property
    def schema(self) -> pa.Schema:
        """The schema of the rows: the source's columns, then those that begin with `_cdc_`."""
        return self._shape.schema

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Return the rows in batches, in no order.

        Raise TableError at once if rows of these epochs were removed.
        """
        self._cut.ensure_rows_since(self._table, self._after, self._files.rows_by_epoch())
        return (each for rows in self._files.change_rows(self._shape) for each in rows.to_batches())

    def of_row(self, key: Mapping[str, Any]) -> pa.Table:
        """Return the changes of the row with a key, by position, with the values not sent.

        Raise ConfigError if `key` does not have the columns of the key.
        """
        wanted = self._key_row(key)
        survey = self._files.survey()
        links = self._files.links(self._shape, BEGINNING, survey.unsent)
        own = key_hashes(wanted, self._key)
        hashes = reached(own, np.concatenate(links, axis=1)) if links else own
        found = [self._shape.schema.empty_table()]
        for rows in self._files.change_rows(self._shape):
            is_wanted = np.isin(key_hashes(rows, self._key), hashes)
            is_wanted |= np.isin(key_hashes(old_keys(rows, self._key), self._key), hashes)
            is_wanted |= pc.equal(rows["_cdc_op"], TRUNCATE).to_numpy()
            found.append(rows.filter(pa.array(is_wanted)))
        order = [(name, "ascending") for name in _POSITION]
        changes = pa.concat_tables(found).sort_by(order).combine_chunks()
        return self._filled(changes, wanted)

    def _key_row(self, key: Mapping[str, Any]) -> pa.Table:
        if not self._key:
            raise ConfigError(f"key: table {self._table} has no key")
        for name in [*key, *self._key]:
            if name not in self._key or name not in key:
                hint = did_you_mean(name, self._key) if name in key else ""
                is_ = ", ".join(self._key)
                msg = f"key: {name!r} is {'not part of' if name in key else 'missing in'} the key"
                raise ConfigError(f"{msg} of table {self._table}: {hint}it is {is_}")
        try:
            arrays = [pa.array([key[n]], self._shape.schema.field(n).type) for n in self._key]
        except pa.ArrowException as error:
            raise ConfigError(f"key: {str(error).splitlines()[0]}") from error
        return pa.table(arrays, names=list(self._key))

    def _filled(self, changes: pa.Table, wanted: pa.Table) -> pa.Table:
        """Return the changes of one row among those of the keys linked with it."""
        is_own = _has_key(changes, wanted) | _has_key(old_keys(changes, self._key), wanted)
        is_marker = pc.equal(changes["_cdc_op"], TRUNCATE).to_numpy()
        found = [changes.slice(0, 0)]
        for number in np.flatnonzero(is_own | is_marker).tolist():
            row = changes.slice(number, 1)
            is_unsent = row["_cdc_unchanged"].null_count == 0
            found.append(self._with_values(row, changes.slice(0, number + 1)) if is_unsent else row)
        return pa.concat_tables(found).combine_chunks()

    def _with_values(self, row: pa.Table, until: pa.Table) -> pa.Table:
        """Return a change with the values that were not sent, from the changes before it."""
        unsent: Sequence[str] = row["_cdc_unchanged"][0].as_py()
        names = [c.name for c in self._shape.columns]
        above = above_truncate(until)
        folded = fold_to_outcomes(above, names, self._key, max_singly=above.num_rows * len(names))
        assert folded is not None
        outcomes = folded.outcomes
        is_row = pc.and_(*(pc.equal(outcomes[n], row[n][0]) for n in _POSITION))
        outcome = outcomes.filter(pc.and_(is_row, pc.invert(outcomes[DELETED])))
        if not outcome.num_rows:
            return row
        kept = set(outcome["_cdc_kept"][0].as_py() or ())
        kept |= {name for number, name, _ in folded.kept_under_old_key if is_row[number].as_py()}
        texts = {n: t for n, t in row["_cdc_raw"][0].as_py() or () if n.startswith(OF_BEFORE)}
        texts |= dict(outcome["_cdc_raw"][0].as_py() or ())
        columns = {n: row[n] for n in row.schema.names}
        columns |= {n: outcome[n] for n in unsent if n not in kept}
        columns["_cdc_raw"] = pa.array([sorted(texts.items()) or None], row["_cdc_raw"].type)
        columns["_cdc_unchanged"] = pa.array([sorted(kept) or None], row["_cdc_unchanged"].type)
        return pa.table(columns, schema=row.schema)


def _has_key(rows: pa.Table, wanted: pa.Table) -> NDArray[np.bool_]:
    """Return which rows have the wanted key, by its hash: NaN equals NaN. A null equals none.

    The hash is salted: a client of the source may have chosen another key of the same hash.
    """
    names, salted = wanted.column_names, HashBlocks.salted()
    found: NDArray[np.bool_] = key_hashes(rows, names, salted) == key_hashes(wanted, names, salted)
    for name in names:
        found &= rows[name].is_valid().to_numpy()
    return found

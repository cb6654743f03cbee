"""Enum labels that the stream sends and that no reading of the catalog has seen.

If a label is added, used and renamed between two readings, rows hold it under a name that the
catalog never had. Only the rows show it: their labels are compared with those of the last reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from ingestd.decode.type_mapping import Types, innermost
from ingestd.model.changes import ChangeSet, TableBatch
from ingestd.postgres.rewrites.fingerprint import TableFingerprint


@dataclass(frozen=True, slots=True)
class EnumColumns:
    """The labels that each enum column of a table can hold, by the OID of the column's type."""

    labels: Mapping[int, frozenset[str]]

    def unknown(self, batch: TableBatch) -> dict[str, int]:
        """Return the batch's labels that are not among these, each with a transaction's id."""
        found: dict[str, int] = {}
        for column in batch.table.columns:
            known = self.labels.get(column.type_oid)
            if known is None or column.mask is not None:
                continue
            values, xids = batch.rows.column(column.lake_name), batch.rows.column("_cdc_xid")
            if pa.types.is_list(values.type):
                xids = xids.take(pc.list_parent_indices(values))
                values = pc.list_flatten(values)
            if not pa.types.is_string(values.type):
                continue
            new = [v for v in pc.unique(values).to_pylist() if v is not None and v not in known]
            for label in new:
                wrote = xids.filter(pc.equal(values, label))
                found[label] = max(found.get(label, 0), pc.max(wrote).as_py())
        return found


def enum_columns(storage: TableFingerprint, type_oids: Iterable[int], types: Types) -> EnumColumns:
    """Return the labels of columns of these types, as of the catalog reading of `storage`."""
    labels = {t.oid: t.labels for t in storage.types if t.labels and not t.is_inside}
    found = {oid: labels.get(innermost(oid, types)) for oid in type_oids}
    return EnumColumns({oid: known for oid, known in found.items() if known is not None})


def unknown_labels(
    change_set: ChangeSet, columns: Mapping[int, EnumColumns]
) -> dict[int, dict[str, int]]:
    """Return the result of `EnumColumns.unknown` for a change set, by the table's OID."""
    found: dict[int, dict[str, int]] = {}
    for batch in change_set.batches:
        enums = columns.get(batch.table.oid)
        if enums is not None and (new := enums.unknown(batch)):
            found[batch.table.oid] = found.get(batch.table.oid, {}) | new
    return found

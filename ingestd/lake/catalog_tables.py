"""Lists a source's tables of a lake for a catalog."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from deltalake.exceptions import TableNotFoundError

from ingestd.lake.definitions import Definition, Registry
from ingestd.lake.delta.log import lake_schema
from ingestd.lake.delta.log_files import open_table
from ingestd.lake.delta.read import read_files
from ingestd.lake.layout import Layout
from ingestd.lake.registry_table import SCHEMA as TABLES_SCHEMA
from ingestd.lake.store.errors import storage_faults, table_fault
from ingestd.lake.store.store import Store
from ingestd.lake.table_folders import raw_tables, reference_tables
from ingestd.model.catalog_names import catalog_name
from ingestd.model.catalog_table import CatalogColumn, CatalogListing, CatalogTable
from ingestd.model.errors import FolderError, IngestdError, TableError
from ingestd.model.schema import TableId, lake_type_name

_OWN = {
    "_epochs": "Epochs of source {}: one row each, with the version of every table in it",
    "_tables": "Schemas and states of the tables of source {}",
}
_REFERENCE = "_ref__"
_COMMENTS: Mapping[str, str] = {
    "_cdc_op": "r snapshot row, c insert, u update, d delete, t truncate or marker",
    "_cdc_lsn": "LSN of the transaction's commit record",
    "_cdc_seq": "Position of the change in its transaction",
    "_cdc_xid": "Transaction id; null for snapshot rows",
    "_cdc_ts": "Commit time at the source; of a snapshot row, the snapshot's time",
    "_cdc_epoch": "Epoch that committed the row, as in _epochs",
    "_cdc_before": "The old row, as far as the server sent it",
    "_cdc_unchanged": "Columns that the server did not send; null here, with the value as before",
    "_cdc_raw": "Texts of values that their columns can't hold, by the name of the column",
}


def list_for_catalog(store: Store, source: str) -> CatalogListing:
    """Return what a catalog should have of a source. Blocks.

    Raise OperatorError and TransientError if the source's lake can't be read.
    """
    return _Listing(store, source).read()


class _Listing:
    def __init__(self, store: Store, source: str) -> None:
        self._store, self._source, self._layout = store, source, Layout(source)
        self._tables: list[CatalogTable] = []
        self._faults: dict[str, IngestdError] = {}

    def read(self) -> CatalogListing:
        """Return all of them."""
        layout, store = self._layout, self._store
        registry = Registry(self._registry_rows())
        with storage_faults(store.uri(layout.root)):
            raw = raw_tables(store, layout)
            references = reference_tables(store, layout, ())
        for name, comment in _OWN.items():
            self._add(name, f"{layout.root}/{name}", comment.format(self._source), {}, None)
        dropped = {}
        gone = set(registry.dropped)
        for prefix, tables, folder_of, what in (
            ("", raw, layout.raw, "Changes"),
            (_REFERENCE, references, layout.reference, "Current rows"),
        ):
            for table in sorted(tables):
                name = catalog_name(table, prefix)
                if str(table) in gone:
                    dropped[name] = self._location(folder_of(table))
                    continue
                comment = f"{what} of {table} of source {self._source}, from ingestd"
                self._add(name, folder_of(table), comment, _COMMENTS, table, registry)
        return CatalogListing(tuple(self._tables), dropped, self._faults)

    def _registry_rows(self) -> list[dict[str, Any]]:
        folder = self._layout.tables
        with storage_faults(self._store.uri(folder)):
            try:
                handle = open_table(self._store, folder)
            except TableNotFoundError:
                return []
            absent = dict.fromkeys(TABLES_SCHEMA.names)  # for an earlier version's table
            return [absent | row for row in read_files(handle, self._store, folder).to_pylist()]

    def _add(  # noqa: PLR0917 - of one table
        self,
        name: str,
        folder: str,
        comment: str,
        comments: Mapping[str, str],
        table: TableId | None,
        registry: Registry | None = None,
    ) -> None:
        definition = None if table is None or registry is None else registry.at(str(table))
        try:
            with storage_faults(self._store.uri(folder)):
                uri = self._store.uri(folder)
                schema = lake_schema(open_table(self._store, folder).schema(), uri)
        except TableNotFoundError:
            return
        except FolderError as error:
            where = self._store.uri(folder)
            self._faults[name] = (
                error if table is None else table_fault(error, self._source, table, where)
            )
            return
        except TableError as error:
            self._faults[name] = error
            return
        own = {c.name: c.comment for c in definition.columns} if definition else {}
        columns = tuple(
            CatalogColumn(f.name, kind_of(f.type), own.get(f.name) or comments.get(f.name))
            for f in schema
        )
        properties = {"ingestd.source": self._source, **_properties(table, definition)}
        self._tables.append(
            CatalogTable(name, self._location(folder), comment, columns, properties)
        )

    def _location(self, folder: str) -> str:
        uri = self._store.uri(folder)
        return uri if "://" in uri else f"file://{uri}"


def _properties(table: TableId | None, definition: Definition | None) -> dict[str, str]:
    found = {} if table is None else {"ingestd.table": str(table)}
    if definition is not None:
        found["ingestd.key"] = json.dumps(list(definition.key), ensure_ascii=False)
    return found


def kind_of(kind: pa.DataType) -> Any:  # noqa: ANN401 - JSON
    """Return a type as Delta's schema has it."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return {"type": "array", "elementType": kind_of(kind.value_type), "containsNull": True}
    if pa.types.is_map(kind):
        found = {"keyType": kind_of(kind.key_type), "valueType": kind_of(kind.item_type)}
        return {"type": "map", **found, "valueContainsNull": True}
    if pa.types.is_struct(kind):
        fields = [
            {"name": f.name, "type": kind_of(f.type), "nullable": True, "metadata": {}}
            for f in kind
        ]
        return {"type": "struct", "fields": fields}
    return lake_type_name(kind)

"""The tables that have a folder in the lake, whether or not a log lists them.

A folder whose name is none that ingestd makes is ignored: it is no table's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ingestd.lake.layout import OWN_FOLDERS, Layout, name_of, segment
from ingestd.lake.store.plain_files import OthersLinkError
from ingestd.lake.store.store import Store
from ingestd.model.schema import TableId


def raw_tables(store: Store, layout: Layout, known: Collection[TableId] = ()) -> list[TableId]:
    """Return the tables that have a raw table's folder. Raise OSError.

    A schema's folder that is a link made by another user is not listed. Instead, the tables of
    `known` in that schema are returned, and opening each of them reports that fault.
    """
    schemas = [name for name in store.folders(layout.root) if name not in OWN_FOLDERS]
    return list(_tables(store, layout, layout.root, schemas, known))


def reference_tables(store: Store, layout: Layout, known: Collection[TableId]) -> list[TableId]:
    """Return the tables that have a reference table's folder, as `raw_tables` does."""
    folder = f"{layout.root}/_ref"
    try:
        schemas = store.folders(folder)
    except OthersLinkError:
        return list(known)
    return list(_tables(store, layout, folder, schemas, known))


def _tables(
    store: Store, layout: Layout, folder: str, schemas: Iterable[str], known: Collection[TableId]
) -> Iterator[TableId]:
    for schema in schemas:
        if name_of(schema) is None:
            continue
        try:
            found = store.folders(f"{folder}/{schema}")
        except OthersLinkError:
            yield from (table for table in known if segment(table.schema) == schema)
        else:
            every = (layout.table_of(schema, table) for table in found)
            yield from (table for table in every if table is not None)

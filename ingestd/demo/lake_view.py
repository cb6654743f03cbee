"""The number of epochs and rows of a source, from the lake's `_epochs`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from deltalake.exceptions import TableNotFoundError

from ingestd.lake.delta.log_files import open_table
from ingestd.lake.delta.read import read_files
from ingestd.lake.layout import Layout
from ingestd.lake.store.store import open_store


@dataclass(frozen=True, slots=True)
class LakeView:
    """`rows`: rows appended to each table so far, by "schema.table"."""

    epochs: int = 0
    rows: Counter[str] = field(default_factory=Counter)


def view_lake(uri: str, source: str) -> LakeView:
    """Return the epochs and rows in the lake; none until it is created."""
    store = open_store(uri, None)
    folder = Layout(source).epochs
    try:
        handle = open_table(store, folder)
    except TableNotFoundError:
        return LakeView()
    epochs = read_files(handle, store, folder, columns=["epoch", "tables"]).to_pylist()
    rows: Counter[str] = Counter()
    for epoch in epochs:
        for table in epoch["tables"]:
            rows[table["table"]] += table["rows"]
    return LakeView(max((e["epoch"] for e in epochs), default=0), rows)

"""Raw tables that another program altered: not written over, whenever that is noticed (I8)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema

from ingestd.lake.store.local_store import LocalStore
from ingestd.model.errors import FolderError, TableError
from ingestd.model.schema import _TYPE_NAMES, TIMESTAMP, TIMESTAMP_NTZ, Column
from tests.harness.damages import ALTERED, HARMLESS, newest
from tests.unit.lake.rows import make_batch, make_table, summary
from tests.unit.lake.stores import StoreWithoutPut, lake_by

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TABLES = {kind: make_table(kind) for kind in ALTERED | HARMLESS}
MORE = Column("later", 25, -1, pa.string(), "text")


class Epochs:
    """A lake to which epochs are appended; `stopped`: tables that could not be."""

    def __init__(self, root: Path, kind: type[LocalStore] = LocalStore) -> None:
        self.stopped: dict[str, TableError] = {}
        self._root = root
        self._kind = kind
        self.sink = lake_by(kind, root)

    async def open(self) -> None:
        self.sink = lake_by(self._kind, self._root)
        found = dict((await self.sink.open()).damaged)
        found |= await self.sink.fence()
        await self.sink.adopt("7000000000000000001")
        self.stopped = {table.name: error for table, error in found.items()}

    async def append(self, lsn: int, *more: Column) -> None:
        writer = self.sink.begin_epoch()
        for kind in TABLES.keys() - self.stopped:
            row = {"id": lsn, "note": "a", "later": "b", "_cdc_lsn": lsn, "_cdc_seq": 1}
            await writer.append_batch(make_batch(make_table(kind, *more), [row]))
        await writer.commit(summary(lsn, lsn + 5), self._stop)

    async def _stop(self, errors: Sequence[TableError]) -> None:
        self.stopped |= {error.table.name: error for error in errors}


@pytest.mark.parametrize("when", ["running", "down"])
@pytest.mark.parametrize("kind", [LocalStore, StoreWithoutPut], ids=["by put", "by handle"])
async def test_isolated_an_altered_table_is_not_written_over(
    tmp_path: Path, when: str, kind: type[LocalStore]
) -> None:
    epochs = Epochs(tmp_path, kind)
    await epochs.open()
    for lsn in (100, 200):
        await epochs.append(lsn)
    if when == "down":
        await epochs.sink.close()
    folders = {name: tmp_path / "shop/public" / name for name in TABLES}
    for name, alter in (ALTERED | HARMLESS).items():
        alter(folders[name])
    altered = {name: newest(folders[name]) for name in ALTERED}
    if when == "down":
        await epochs.open()
    await epochs.append(300)
    await epochs.append(400, MORE)
    assert epochs.stopped.keys() == ALTERED.keys()
    for name, error in epochs.stopped.items():
        assert newest(folders[name]) == altered[name], name
        assert f"ingestd snapshot shop public.{name}" in (error.remedy or "")
        with pytest.raises(TableError):  # nor by a new snapshot, until it is put right
            await epochs.sink.raw_tables.reload_if_damaged(TABLES[name].id)
    await epochs.sink.close()
    await epochs.open()
    assert epochs.stopped.keys() == ALTERED.keys()
    await epochs.sink.close()


async def test_isolated_a_foreign_column_of_another_type_stops_it(
    tmp_path: Path,
) -> None:
    epochs = Epochs(tmp_path)
    await epochs.open()
    await epochs.append(100)
    added = Schema.from_arrow(pa.schema([("later", pa.date32())])).fields
    DeltaTable(tmp_path / "shop/public/mapped").alter.add_columns(added)
    await epochs.append(200)
    assert not epochs.stopped
    await epochs.append(300, MORE)
    [error] = epochs.stopped.values()
    assert "column later is date in the lake, but its rows are now string" in error.reason
    await epochs.sink.close()


@pytest.mark.parametrize("kind", ["row_tracking", "mapped_dropped"])
@pytest.mark.parametrize("own", ["_epochs", "_tables"])
async def test_the_sources_own_tables_are_not_written_over(
    tmp_path: Path, own: str, kind: str
) -> None:
    epochs = Epochs(tmp_path)
    await epochs.open()
    await epochs.append(100)
    await epochs.sink.close()
    column = {"_epochs": "tables", "_tables": "state"}[own]
    ALTERED[kind](tmp_path / "shop" / own)
    said = {"row_tracking": "rowTracking", "mapped_dropped": f"column {column} is missing"}[kind]
    with pytest.raises(FolderError, match=said) as caught:
        await epochs.open()
    assert own in caught.value.what
    assert "put the folder back from a copy" in (caught.value.remedy or "")


OWN = [*_TYPE_NAMES, pa.decimal128(38, 9), pa.list_(TIMESTAMP_NTZ), pa.struct({"a": TIMESTAMP})]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LocalStore, StoreWithoutPut], ids=["by put", "by handle"])
async def test_isolated_features_listed_by_deltalake_are_no_obstacle(
    tmp_path: Path, kind: type[LocalStore]
) -> None:
    columns = [Column(f"c{n}", 25, -1, of, "text") for n, of in enumerate(OWN)]
    rounds = [[], columns, [*columns, MORE], [*columns, MORE]]
    for lsn, more in enumerate(rounds, start=1):
        sink = lake_by(kind, tmp_path)
        assert not (await sink.open()).damaged
        assert not await sink.fence()
        await sink.adopt("7000000000000000001")
        writer = sink.begin_epoch()
        for first in columns:
            rest = [column for column in more if column is not first]
            row = {"id": lsn, "_cdc_lsn": 10 * lsn, "_cdc_seq": 1}
            batch = make_batch(make_table(first.name, first, *rest), [row])
            await writer.append_batch(replace(batch, resume=f"up to {lsn}"))
        stopped: list[TableError] = []
        await writer.commit(summary(10 * lsn, 10 * lsn + 5), partial(_note, stopped))
        assert not stopped
        await sink.close()


async def _note(stopped: list[TableError], errors: Sequence[TableError]) -> None:
    stopped.extend(errors)

"""What can't be read is refused, with what, where and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

import ingestd
from ingestd.lake.epochs_table import SCHEMA as EPOCHS_SCHEMA
from ingestd.lake.layout import Layout
from ingestd.lake.store.store import open_store
from ingestd.model.errors import ConfigError, FolderError, OperatorError, TableError
from ingestd.reading.cut import SourceRecords
from tests.harness.raw_lake import RawLake
from tests.unit.lake.rows import make_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from ingestd.reading.lake import LakeTable

ORDERS = make_table("orders")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> RawLake:
    """A lake whose table has a marker and rows 1 and 2 in epoch 1, row 3 in epoch 2."""
    raw = RawLake(tmp_path_factory.mktemp("filled"))
    raw.next_lsn()
    place = {"_cdc_lsn": raw.lsn, "_cdc_seq": 0, "_cdc_op": "r"}
    marker = {"_cdc_lsn": raw.lsn, "_cdc_seq": -1, "_cdc_op": "t"}
    raw.commit({ORDERS: [marker, *({**place, "id": n, "note": "a"} for n in (1, 2))]})
    raw.record("live", ORDERS, snapshot_lsn=raw.lsn)
    raw.commit({ORDERS: [{"id": 3, "note": "b", "_cdc_lsn": raw.next_lsn(), "_cdc_seq": 1}]})
    return raw


@pytest.fixture
def lake(filled: RawLake, tmp_path: Path) -> RawLake:
    return filled.copied_to(tmp_path / "lake")


def table_of(lake: RawLake, name: str = "public.orders") -> LakeTable:
    return ingestd.open_lake(str(lake.uri)).source("shop").table(name)


ARGUMENTS: dict[str, tuple[Callable[[LakeTable], object], str]] = {
    "column": (lambda t: t.current(columns=["nota"]), "did you mean 'note'?"),
    "condition's column": (
        lambda t: t.current(where=pc.field("nota") == 1),
        "did you mean 'note'?",
    ),
    "condition's type": (lambda t: t.current(where=pc.field("id") == "x"), "no kernel matching"),
    "column by its number": (lambda t: t.current(where=pc.field(1) == "a"), "name each column"),
    "field by its number": (lambda t: t.current(where=pc.field(("id", 0)) > 1), "name each column"),
    "no condition": (lambda t: t.current(where="id > 5"), "is no condition"),
    "later epoch": (lambda t: t.current(at=3), "has the epochs 1 to 2, not 3"),
    "since": (lambda t: t.changes(since=3), "since: 3 is no epoch from 0"),
    "no column of the key": (lambda t: t.history({"note": "a"}), "key: 'note' is not part of"),
    "no key": (lambda t: t.history({}), "key: 'id' is missing in the key"),
    "key's type": (lambda t: t.history({"id": "x"}), "key: "),
    "no epoch": (lambda t: t.current(at=0), "has the epochs 1 to 2, not 0"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_wrong_argument_is_named(lake: RawLake, name: str) -> None:
    read, text = ARGUMENTS[name]
    with pytest.raises(ConfigError) as caught:
        read(table_of(lake))
    assert text in str(caught.value)


def test_unknown_tables_and_sources_have_the_nearest_name(lake: RawLake) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'public\.orders'"):
        table_of(lake, "public.order").current()
    with pytest.raises(ConfigError, match=r"write it as schema\.table"):
        table_of(lake, "orders")
    with pytest.raises(ConfigError, match="did you mean 'shop'"):
        ingestd.open_lake(str(lake.uri)).source("shopp")


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_a_lake_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(OperatorError):
        ingestd.open_lake(str(tmp_path / name))


def test_a_lake_of_a_newer_format_is_refused(lake: RawLake) -> None:
    (lake.uri / "_ingestd.json").write_text('{"format": 2, "lake": "x"}')
    with pytest.raises(OperatorError, match="a newer version has written the lake"):
        ingestd.open_lake(str(lake.uri))


STATES = {
    "snapshotting": "is being read by the daemon at epoch 2",
    "stopped": "is stopped at epoch 2: its disk is full",
    "dropped": "is dropped at epoch 2",
}


@pytest.mark.parametrize("state", STATES)
def test_an_incomplete_table_is_refused_at_its_epochs(lake: RawLake, state: str) -> None:
    lake.record(state, ORDERS, reason="its disk is full")
    with pytest.raises(TableError) as caught:
        table_of(lake).current()
    assert STATES[state] in caught.value.what
    assert caught.value.remedy is not None
    assert table_of(lake).current(at=1)["id"].to_pylist() == [1, 2]
    described = ingestd.open_lake(str(lake.uri)).source("shop").tables()
    assert [(d.name, d.state, d.is_complete) for d in described] == [
        ("public.orders", state, False)
    ]


def test_i13_rows_that_were_removed_are_not_silently_missing(lake: RawLake) -> None:
    raw = DeltaTable(str(lake.uri / Layout("shop").raw(ORDERS.id)))
    raw.delete("id = 3")
    with pytest.raises(TableError, match="rows of epoch 2 are missing"):
        table_of(lake).current()
    assert table_of(lake).current(at=1).num_rows == 2


def test_changes_that_were_removed_are_not_silently_missing(lake: RawLake) -> None:
    DeltaTable(str(lake.uri / Layout("shop").raw(ORDERS.id))).delete("id = 3")
    source = ingestd.open_lake(str(lake.uri)).source("shop")
    assert source.changes("public.orders", until=1).read_all().num_rows == 3
    with pytest.raises(TableError, match="rows of epoch 2 are missing"):
        table_of(lake).changes(since=1)


def test_rows_below_the_marker_may_be_removed(lake: RawLake) -> None:
    lake.commit({ORDERS: [{"_cdc_op": "t", "_cdc_lsn": lake.next_lsn(), "_cdc_seq": 1}]})
    lake.commit({ORDERS: [{"id": 9, "_cdc_lsn": lake.next_lsn(), "_cdc_seq": 1}]})
    DeltaTable(str(lake.uri / Layout("shop").raw(ORDERS.id))).delete("id < 4")
    assert table_of(lake).current()["id"].to_pylist() == [9]


def test_a_missing_raw_table_is_not_an_empty_one(lake: RawLake) -> None:
    folder = lake.uri / Layout("shop").raw(ORDERS.id)
    folder.rename(folder.with_name("elsewhere"))
    with pytest.raises(TableError, match="rows of epoch 1 are missing"):
        table_of(lake).current()


def test_a_table_without_rows_has_its_columns(lake: RawLake) -> None:
    empty = make_table("empty", oid=2)
    lake.record("live", empty, snapshot_lsn=lake.lsn)
    found = table_of(lake, "public.empty").current()
    assert (found.num_rows, found.schema.names) == (0, ["id", "note", "_cdc_raw"])


def test_a_row_that_was_never_read_is_refused(lake: RawLake) -> None:
    update = {"id": 7, "_cdc_op": "u", "_cdc_unchanged": ["note"]}
    lake.commit({ORDERS: [{**update, "_cdc_lsn": lake.next_lsn(), "_cdc_seq": 1}]})
    with pytest.raises(TableError, match="the row was never read"):
        table_of(lake).current()
    assert table_of(lake).current(columns=["id"]).num_rows == 4


def test_a_table_whose_rows_were_never_read_is_refused(lake: RawLake) -> None:
    lake.record("live", ORDERS)
    with pytest.raises(TableError, match="its rows were never read"):
        table_of(lake).current()


def test_a_source_without_epochs_is_refused(tmp_path: Path) -> None:
    lake = RawLake(tmp_path / "lake")
    lake.record("live", ORDERS)
    with pytest.raises(OperatorError, match="has no epoch yet"):
        table_of(lake).current()


FOREIGN = {
    "other columns": (pa.table({"id": pa.array([1], pa.int32())}), "rows without an operation"),
    "another type": (pa.table({"_cdc_lsn": ["x"]}), "has column '_cdc_lsn' as string"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_another_program_is_a_fault_of_its_table(lake: RawLake, name: str) -> None:
    rows, text = FOREIGN[name]
    folder = lake.uri / Layout("shop").raw(ORDERS.id)
    for path in folder.glob("*.parquet"):
        pq.write_table(rows, path)
    with pytest.raises(TableError) as caught:
        table_of(lake).current()
    assert text in caught.value.what
    assert "ingestd snapshot shop public.orders" in str(caught.value.remedy)


def test_an_epoch_without_a_number_is_refused(lake: RawLake) -> None:
    epochs = str(lake.uri / Layout("shop").epochs)
    row = pa.Table.from_pylist([{"end_lsn": 999}], EPOCHS_SCHEMA)
    write_deltalake(epochs, row, mode="append")
    with pytest.raises(FolderError, match="a row has no epoch"):
        table_of(lake).current()


def test_rows_of_epochs_are_read_once(lake: RawLake) -> None:
    """Rows that were read need no file, and the rows of an unchanged version are the same."""
    records = SourceRecords(open_store(str(lake.uri), None), "shop")
    assert records.cut().epoch == 2
    assert records.epochs() is records.epochs()
    assert records.registry() is records.registry()
    folders = (Layout("shop").epochs, Layout("shop").tables)
    read = [path for each in folders for path in (lake.uri / each).glob("*.parquet")]
    lake.commit({ORDERS: [{"id": 4, "_cdc_lsn": lake.next_lsn(), "_cdc_seq": 1}]})
    for path in read:
        path.unlink()
    assert [records.cut(at).end_lsn for at in (None, 1, 2)] == [135, 115, 125]
    assert records.epochs()["epoch"].to_pylist() == [1, 2, 3]


def test_epochs_that_are_missing_are_noticed(lake: RawLake) -> None:
    lake.commit({ORDERS: [{"id": 4, "_cdc_lsn": lake.next_lsn(), "_cdc_seq": 1}]})
    DeltaTable(str(lake.uri / Layout("shop").epochs)).delete("epoch = 2")
    with pytest.raises(OperatorError, match="epochs are missing below 3"):
        table_of(lake).current()
    DeltaTable(str(lake.uri / Layout("shop").epochs)).delete("epoch = 1")
    with pytest.raises(ConfigError, match="maintenance removed those before 3"):
        table_of(lake).current(at=1)

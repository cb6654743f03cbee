"""Current rows kept beside: only changes are read, and what does not fit is read again."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

import ingestd
from ingestd.lake.lake_id import read_lake_id, write_lake_id
from ingestd.lake.layout import Layout
from ingestd.lake.store.store import open_store
from ingestd.model.errors import OperatorError
from ingestd.model.schema import Column
from ingestd.reading.lake import LakeTable
from ingestd.reading.row_cache import TableCache
from tests.harness.raw_lake import RawLake
from tests.unit.lake.rows import make_table

ORDERS = make_table("orders")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> RawLake:
    """Rows 1 to 3 at epoch 1."""
    raw = RawLake(tmp_path_factory.mktemp("filled"))
    place = {"_cdc_lsn": raw.next_lsn(), "_cdc_op": "r", "_cdc_seq": 0, "note": "a"}
    raw.commit({ORDERS: [{**place, "id": n} for n in (1, 2, 3)]})
    raw.record("live", ORDERS, snapshot_lsn=raw.lsn)
    return raw


@pytest.fixture
def lake(filled: RawLake, tmp_path: Path) -> RawLake:
    return filled.copied_to(tmp_path / "lake")


def change(lake: RawLake, *rows: dict[str, Any]) -> None:
    lsn = lake.next_lsn()
    lake.commit({ORDERS: [{"_cdc_lsn": lsn, "_cdc_seq": n, **r} for n, r in enumerate(rows, 1)]})


def open_table(lake: RawLake) -> LakeTable:
    cache = str(lake.uri.parent / "cache")
    return ingestd.open_lake(str(lake.uri), cache=cache).source("shop").table("public.orders")


def read(lake: RawLake, **more: Any) -> dict[int, str]:
    return {row["id"]: row["note"] for row in open_table(lake).current(**more).to_pylist()}


def entries(lake: RawLake) -> list[int]:
    """Return the epochs of the entries."""
    metas = (lake.uri.parent / "cache").rglob("cache.json")
    return [json.loads(path.read_text())["epoch"] for path in metas]


def remove_files(lake: RawLake) -> None:
    """Remove the raw table's files, so that none of their rows can be read."""
    for path in (lake.uri / Layout("shop").raw(ORDERS.id)).glob("*.arrow"):
        path.unlink()


def test_only_the_changes_since_are_read(lake: RawLake) -> None:
    assert read(lake) == {1: "a", 2: "a", 3: "a"}
    remove_files(lake)
    unsent = {"_cdc_op": "u", "_cdc_unchanged": ["note"]}
    change(lake, {"id": 1, "_cdc_op": "d"}, {"id": 4, "note": "b"})
    change(lake, {"id": 7, "_cdc_before": {"id": 2}, **unsent}, {"id": 3, **unsent})
    assert read(lake) == {3: "a", 4: "b", 7: "a"}
    assert read(lake, where=pc.field("id") == 7) == {7: "a"}
    assert read(lake, at=2) == {2: "a", 3: "a", 4: "b"}
    assert read(lake, at=1) == {1: "a", 2: "a", 3: "a"}
    assert entries(lake) == [1]


def test_an_earlier_epoch_is_read_from_the_lake(lake: RawLake) -> None:
    change(lake, {"id": 4, "note": "b"})
    assert len(read(lake)) == 4
    assert len(read(lake, at=1)) == 3
    assert entries(lake) == [2]


def truncate(lake: RawLake) -> dict[int, str]:
    change(lake, {"_cdc_op": "t"}, {"id": 9, "note": "z"})
    return {9: "z"}


def snapshot_of_a_deleted_row(lake: RawLake) -> dict[int, str]:
    """A row that is read before it is deleted, and arrives afterwards."""
    lsn = lake.lsn
    change(lake, {"id": 1, "_cdc_op": "d"})
    assert read(lake) == {2: "a", 3: "a"}
    late = {"_cdc_op": "r", "_cdc_lsn": lsn + 5, "_cdc_seq": 0, "id": 1, "note": "late"}
    change(lake, late)
    return {2: "a", 3: "a"}


def another_column(lake: RawLake) -> dict[int, str]:
    column = Column("extra", 23, -1, make_table("t").columns[0].type, missing="5")
    lake.next_lsn()
    lake.record("live", replace(ORDERS, columns=(*ORDERS.columns, column)), snapshot_lsn=110)
    change(lake, {"id": 4, "note": "b"})
    return {1: "a", 2: "a", 3: "a", 4: "b"}


def damaged(name: str, content: bytes | None) -> Callable[[RawLake], dict[int, str]]:
    def step(lake: RawLake) -> dict[int, str]:
        for path in (lake.uri.parent / "cache").rglob(name):
            path.write_bytes(path.read_bytes()[:-9] if content is None else content)
        change(lake, {"id": 4, "note": "b"})
        return {1: "a", 2: "a", 3: "a", 4: "b"}

    return step


def other_meta(name: str, value: object) -> Callable[[RawLake], dict[int, str]]:
    def step(lake: RawLake) -> dict[int, str]:
        for path in (lake.uri.parent / "cache").rglob("cache.json"):
            path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
        change(lake, {"id": 4, "note": "b"})
        return {1: "a", 2: "a", 3: "a", 4: "b"}

    return step


STEPS: dict[str, Callable[[RawLake], dict[int, str]]] = {
    "truncate": truncate,
    "snapshot": snapshot_of_a_deleted_row,
    "column": another_column,
    "history": other_meta("end", [1, "x"]),
    "no JSON": damaged("cache.json", b"{"),
    "an empty file": damaged("*.arrow", b""),
    "a cut file": damaged("*.arrow", None),
    "altered bytes": damaged("*.arrow", b"ARROW1"),
    **{
        f"{name} {value}": other_meta(name, value)
        for name in ("epoch", "end", "file", "rows", "signature", "state")
        for value in (None, "x", 1.5, {"x": 1})
    },
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_what_does_not_fit_is_read_again(
    lake: RawLake, step: Callable[[RawLake], dict[int, str]]
) -> None:
    read(lake)
    expected = step(lake)
    assert read(lake) == expected
    assert entries(lake) == [lake.epoch]
    assert len(list((lake.uri.parent / "cache").rglob("*.arrow"))) == 1


@pytest.mark.parametrize("is_filled", [False, True])
def test_a_folder_that_others_may_enter_is_refused(lake: RawLake, *, is_filled: bool) -> None:
    folder = lake.uri.parent / "cache"
    folder.mkdir(mode=0o700)
    if is_filled:
        read(lake)
    folder.chmod(0o755)
    with pytest.raises(OperatorError, match="not a folder of this user only"):
        read(lake)


def test_a_reader_waits_for_the_one_that_fills(lake: RawLake) -> None:
    read(lake)
    folder = next((lake.uri.parent / "cache").rglob("cache.json")).parent
    aside = lake.uri.parent / "aside"
    folder.rename(aside)
    files = {path.name for path in aside.iterdir()}
    store = open_store(str(lake.uri), None)
    name = f"{store.uri('')} {read_lake_id(store)}"
    cache = TableCache(str(lake.uri.parent / "cache"), name, "shop", ORDERS.id)
    with ThreadPoolExecutor(1) as pool:
        with cache.filling():
            reader = pool.submit(read, lake)
            with pytest.raises(TimeoutError):
                reader.result(0.5)
            for name in files - {"lock"}:
                (aside / name).rename(folder / name)
        assert reader.result(20) == {1: "a", 2: "a", 3: "a"}
    assert {path.name for path in folder.iterdir()} == files


def test_readers_that_fill_at_once_get_the_rows(lake: RawLake) -> None:
    with ThreadPoolExecutor(6) as pool:
        found = [*pool.map(lambda _: read(lake), range(12))]
    assert found == [{1: "a", 2: "a", 3: "a"}] * 12
    assert entries(lake) == [1]
    assert len(list((lake.uri.parent / "cache").rglob("*.arrow"))) == 1


def test_an_entry_that_is_replaced_can_still_be_read(lake: RawLake) -> None:
    read(lake)
    table = open_table(lake)
    rows = table.current_batches()
    for _ in range(3):
        change(lake, {"_cdc_op": "t"}, {"id": 9, "note": "z"})
        assert read(lake) == {9: "z"}
    assert sorted(rows.read_all()["id"].to_pylist()) == [1, 2, 3]


def test_an_earlier_epoch_does_not_replace_a_later_entry(lake: RawLake) -> None:
    expected = another_column(lake)
    assert read(lake) == expected
    assert read(lake, at=1) == {1: "a", 2: "a", 3: "a"}
    assert entries(lake) == [2]


@pytest.mark.parametrize("is_filled", [False, True])
def test_rows_are_spilled_where_the_caller_says(lake: RawLake, *, is_filled: bool) -> None:
    """A folder that is missing shows that it is the one that is used."""
    change(lake, {"id": 4, "note": "b"})
    if is_filled:
        read(lake)
        change(lake, {"id": 5, "note": "c"})
    missing = str(lake.uri.parent / "missing")
    with pytest.raises((FileNotFoundError, OperatorError), match="missing/ingestd-"):
        open_table(lake).current_batches(memory_bytes=1, spill_folder=missing).read_all()


@pytest.mark.parametrize("memory_bytes", [1, 1 << 20])
def test_changes_of_any_size_are_folded(lake: RawLake, memory_bytes: int) -> None:
    read(lake)
    change(lake, {"id": 1, "_cdc_op": "d"}, {"id": 4, "note": "b"})
    found = open_table(lake).current_batches(
        columns=["note", "id"], where=pc.field("note") == "b", memory_bytes=memory_bytes
    )
    assert found.read_all().to_pylist() == [{"note": "b", "id": 4}]


def test_a_file_altered_in_place_is_not_used(lake: RawLake) -> None:
    read(lake)
    for path in (lake.uri.parent / "cache").rglob("*.arrow"):
        content = path.read_bytes()
        path.write_bytes(content[:400] + b"\xff" * 60 + content[460:])
    assert read(lake) == {1: "a", 2: "a", 3: "a"}


def row(number: int, note: str) -> dict[str, Any]:
    return {"id": number, "note": note}


@pytest.mark.parametrize("changed", [3, 2_000])
def test_rows_between_changed_ones_are_kept(lake: RawLake, changed: int) -> None:
    """Few changes cut batches, many copy them."""
    rng = random.Random(changed)
    place = {"_cdc_lsn": lake.next_lsn(), "_cdc_op": "r", "_cdc_seq": 0}
    lake.commit({ORDERS: [{**place, **row(n, "a")} for n in range(4, 70_001)]})
    lake.record("live", ORDERS, snapshot_lsn=lake.lsn)
    expected = dict.fromkeys(range(1, 70_001), "a")
    assert read(lake) == expected
    chosen = rng.sample(range(-100, 70_101), changed)
    deleted, updated = chosen[: changed // 2], chosen[changed // 2 :]
    deletes = [{"id": n, "_cdc_op": "d"} for n in deleted]
    change(lake, *deletes, *({**row(n, "b"), "_cdc_op": "u"} for n in updated))
    for number in deleted:
        expected.pop(number, None)
    assert read(lake) == expected | dict.fromkeys(updated, "b")
    assert entries(lake) == [2]


@pytest.mark.attack("lake writer")
def test_a_lake_of_the_same_id_has_its_own_rows(lake: RawLake) -> None:
    """Who writes a copy of a lake decided what readers of the original saw."""
    write_lake_id(open_store(str(lake.uri), None))
    copy = RawLake(lake.uri.parent / "copy")
    shutil.copytree(lake.uri, copy.uri)
    forged = lake.uri.parent / "forged"
    other = RawLake(forged)
    place = {"_cdc_lsn": other.next_lsn(), "_cdc_op": "r", "_cdc_seq": 0, "note": "forged"}
    other.commit({ORDERS: [{**place, "id": n} for n in (1, 2, 3)]})
    own = Layout("shop").raw(ORDERS.id)
    shutil.rmtree(copy.uri / own)
    (forged / own).rename(copy.uri / own)
    assert set(read(copy).values()) == {"forged"}
    assert set(read(lake).values()) == {"a"}

"""What a backfill keeps of itself outlives any kill."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from ingestd.lake.store.store import ObjectStore, Store, open_store
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Column, Mask
from ingestd.ports import Fragment
from spark_jobs.backfills.record import Note, Plan, PlannedSplit, Record, definition_of, write_note
from spark_jobs.backfills.runner import of_text, to_text
from spark_jobs.backfills.task import Failure
from tests.unit.sink.rows import AT, make_table

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = "shop/public/a"


def fragment(path: str) -> Fragment:
    return Fragment(path, len(path), 3, '{"numRecords":3}', 7)


def note(split: int, *paths: str) -> Note:
    return Note(split, Lsn(200), AT, 3, 90, tuple(map(fragment, paths)))


PLAN = Plan(
    run="0001-a",
    definition="d",
    origin="7/1",
    epoch=5,
    position=None,
    watermark=Lsn(5),
    point=Lsn(200),
    at=AT,
    marker=fragment("marker"),
    splits=(PlannedSplit("x", 1), PlannedSplit("ü", 2), PlannedSplit("z", 3)),
)


@pytest.fixture(params=["local", "object"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    # An object store's code, on files.
    is_local = request.param == "local"
    return open_store(str(tmp_path), None) if is_local else ObjectStore(f"file://{tmp_path}", None)


def put(store: Store, name: str) -> None:
    store.make_folder(FOLDER)
    with store.create(f"{FOLDER}/{name}") as file:
        file.write(name.encode())


def test_the_last_plan_with_its_own_and_earlier_notes(store: Store) -> None:
    record = Record(store, FOLDER)
    assert record.last_plan() is None
    record.write_plan(PLAN)
    assert record.last_plan() == PLAN
    write_note(store, record.run_folder(PLAN.run), note(1, "one"))
    write_note(store, record.run_folder(PLAN.run), note(1, "twice"))
    later = PLAN.continued(list(record.notes(PLAN).values()))
    assert later.run.startswith("0002-")
    record.write_plan(later)
    write_note(store, record.run_folder(PLAN.run), note(2, "by a task of the first driver"))
    write_note(store, record.run_folder(later.run), note(0, "zero"))
    found = record.last_plan()
    assert found == later
    notes = record.notes(later)
    assert sorted(notes) == [0, 1]
    assert notes[0] == note(0, "zero")


def test_half_written_plans_and_notes_are_none(store: Store, tmp_path: Path) -> None:
    record = Record(store, FOLDER)
    record.write_plan(PLAN)
    later = PLAN.continued(())
    record.write_plan(later)
    path = tmp_path / record.run_folder(later.run) / "plan.json"
    path.write_text(path.read_text("utf-8")[:50], "utf-8")
    assert record.last_plan() == PLAN
    write_note(store, record.run_folder(PLAN.run), note(1, "one"))
    [path] = (tmp_path / record.run_folder(PLAN.run)).glob("split-*")
    path.write_bytes(b'{"split": 1, "poi')
    assert record.notes(PLAN) == {}


def test_a_note_counts_while_its_files_are_there(store: Store, tmp_path: Path) -> None:
    record = Record(store, FOLDER)
    for name in ("one", "two", "three"):
        put(store, name)
    notes = {0: note(0, "one", "two"), 1: note(1, "three"), 2: note(2)}
    assert record.with_files(notes) == notes
    (tmp_path / FOLDER / "two").unlink()  # by VACUUM
    (tmp_path / FOLDER / "three").write_bytes(b"cut")
    assert sorted(record.with_files(notes)) == [2]


def test_discarded_is_all_that_is_not_committed(store: Store, tmp_path: Path) -> None:
    record = Record(store, FOLDER)
    record.write_plan(PLAN)
    for name in ("marker", "one", "one too", "two", "another's"):
        put(store, name)
    write_note(store, record.run_folder(PLAN.run), note(0, "one"))
    write_note(store, record.run_folder(PLAN.run), note(0, "one too"))
    write_note(store, record.run_folder(PLAN.run), note(1, "two"))
    record.discard({"one"})
    left = sorted(p.name for p in (tmp_path / FOLDER).rglob("*") if p.is_file())
    assert left == ["another's", "one"]
    record.discard(())


def test_the_definition_tells_what_rows_are_like() -> None:
    table = make_table("a")
    secret = Mask("sha256", b"key")
    masked = replace(table.columns[1], mask=secret)
    other = replace(masked, mask=Mask("sha256", b"another"))
    tables = [
        table,
        replace(table, columns=(table.columns[0], masked)),
        replace(table, columns=(table.columns[0], other)),
        make_table("a", Column("more", 23, -1, pa.int32())),
        replace(table, row_filter="id > 1"),
        replace(table, oid=9),
    ]
    assert len({definition_of(t) for t in tables}) == len(tables)
    assert definition_of(replace(table, storage="elsewhere")) == definition_of(table)


@pytest.mark.parametrize(
    "outcome",
    [
        note(3, "one"),
        Failure("no", "do", make_table("ü.b").id),
        Failure("no", None, None, "timeout"),
        Failure("no", None),
    ],
)
def test_outcomes_cross_processes(outcome: Note | Failure) -> None:
    assert of_text(to_text(outcome)) == outcome

"""What a backfill keeps of itself outlives any kill."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ingestd.lake.store.object_store import ObjectStore
from ingestd.lake.store.store import Store, open_store
from ingestd.model.errors import OperatorError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Column, Mask
from ingestd.ports import Fragment
from spark_jobs.backfills.record import Note, Plan, PlannedSplit, Record, definition_of, write_note
from spark_jobs.backfills.runner import of_text, to_text
from spark_jobs.backfills.task import Failure
from tests.unit.lake.rows import AT, make_table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOLDER = "shop/public/a"


def fragment(name: str) -> Fragment:
    path = f"part-{name}.parquet"
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
    path = f"part-{name}.parquet"
    store.make_folder(FOLDER)
    with store.create(f"{FOLDER}/{path}") as file:
        file.write(path.encode())


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
    write_note(store, record.run_folder(PLAN.run), note(2, "of_the_first_driver"))
    write_note(store, record.run_folder(later.run), note(0, "zero"))
    found = record.last_plan()
    assert found == later
    notes = record.notes(later)
    assert sorted(notes) == [0, 1]
    assert notes[0] == note(0, "zero")


def test_the_names_in_a_record_stay() -> None:
    names = ["path", "size_bytes", "rows", "stats_json", "modification_time_ms"]
    plan = json.loads(replace(PLAN, taken=(note(1, "one"),)).to_text())
    assert list(plan["marker"]) == list(plan["taken"][0]["fragments"][0]) == names


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
    (tmp_path / FOLDER / "part-two.parquet").unlink()  # by VACUUM
    (tmp_path / FOLDER / "part-three.parquet").write_bytes(b"cut")
    assert sorted(record.with_files(notes)) == [2]


def test_discarded_is_all_that_is_not_committed(store: Store, tmp_path: Path) -> None:
    record = Record(store, FOLDER)
    record.write_plan(PLAN)
    for name in ("marker", "one", "one_too", "two", "another"):
        put(store, name)
    write_note(store, record.run_folder(PLAN.run), note(0, "one"))
    write_note(store, record.run_folder(PLAN.run), note(0, "one_too"))
    write_note(store, record.run_folder(PLAN.run), note(1, "two"))
    record.discard({"part-one.parquet"})
    left = sorted(p.name for p in (tmp_path / FOLDER).rglob("*") if p.is_file())
    assert left == ["part-another.parquet", "part-one.parquet"]
    record.discard(())


HOSTILE: list[object] = [
    *(None, True, -1, 1 << 63, 1.5, [], {}, "", "x", "0/0", "2026-01-01T00:00:00"),
    *(
        "../victim.parquet",
        "../../../../victim",
        "part-1/../../../../../victim",
        "../b/part-b.parquet",
    ),
    *("..", "part-x\0.parquet", "..%2fvictim", "_backfill", "_delta_log/0.json", "log", [["x"]]),
]


def places_in(document: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield where a JSON document has a value, by keys and positions."""
    yield above
    if isinstance(document, dict | list):
        inner = document.items() if isinstance(document, dict) else enumerate(document)
        for key, value in inner:
            yield from places_in(value, (*above, key))


def altered(document: Any, place: tuple[str | int, ...], value: object) -> Any:
    if not place:
        return value
    found = copy.deepcopy(document)
    holder = found
    for key in place[:-1]:
        holder = holder[key]
    if value is DELETED:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return found


DELETED = object()
WRITTEN = replace(PLAN, taken=(note(1, "taken"),))


@pytest.mark.slow
@pytest.mark.attack("lake writer")
@pytest.mark.parametrize("kind", ["plan", "note"])
def test_a_hostile_plan_or_note_removes_only_own_files(
    store: Store, tmp_path: Path, kind: str
) -> None:
    """The lake's writers can put any text there: it is refused as a unit, or names own files."""
    record = Record(store, FOLDER)
    record.write_plan(WRITTEN)
    write_note(store, record.run_folder(WRITTEN.run), note(0, "one"))
    for name in ("marker", "taken", "one"):
        put(store, name)
    kept = [tmp_path / "shop/public/b/part-b.parquet", tmp_path / FOLDER / "theirs.parquet"]
    kept += [tmp_path / FOLDER / "log", tmp_path / "victim", tmp_path.parent / "victim"]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    pattern = "plan.json" if kind == "plan" else "split-*"
    [path] = (tmp_path / record.run_folder(WRITTEN.run)).glob(pattern)
    sound, document = path.read_text(), json.loads(path.read_text())
    texts = [
        json.dumps(altered(document, place, value))
        for place in places_in(document)
        for value in ([*HOSTILE, DELETED] if place else HOSTILE[:-1])
    ]
    texts += [
        sound.replace("200", "2" * 5000),
        "[" * 100_000,
        '{"a":' * 100_000,
        "[]" * 9,
        "\ud800",
    ]
    assert len(texts) > 300
    spared, refusals = tmp_path / "spared", []
    shutil.copytree(tmp_path / FOLDER, spared)
    for text in texts:
        path.write_text(text, "utf-8", "surrogatepass")
        before = files_of(tmp_path)
        try:
            plan = record.last_plan()
            record.with_files({} if plan is None else record.notes(plan))
            record.discard({"part-one.parquet"})
        except OperatorError as error:
            refusals.append(str(error.remedy))
            assert files_of(tmp_path) == before, text[:200]
        else:
            assert all(each.exists() for each in kept), text[:200]
            shutil.rmtree(tmp_path / FOLDER)
            shutil.copytree(spared, tmp_path / FOLDER)
    assert len(refusals) > len(texts) // 2
    command = f'mv {tmp_path / FOLDER}/_backfill "$(mktemp -d)"'
    assert all(command in each for each in refusals if store.syncs)


def files_of(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}


@pytest.mark.attack("lake writer")
@pytest.mark.parametrize("kind", ["plan", "note"])
def test_a_plan_or_note_is_read_only_up_to_a_limit(store: Store, tmp_path: Path, kind: str) -> None:
    record = Record(store, FOLDER, most_bytes=5000)
    record.write_plan(PLAN)
    for split in range(2):
        write_note(store, record.run_folder(PLAN.run), note(split))
    if kind == "plan":
        path = tmp_path / record.run_folder(PLAN.run) / "plan.json"
        path.write_text(path.read_text() + " " * 5000)
    else:
        for path in (tmp_path / record.run_folder(PLAN.run)).glob("split-*"):
            path.write_text(path.read_text() + " " * 2500)
    with pytest.raises(OperatorError, match="bytes, more than"):
        record.discard(())
    assert record.run_folder(PLAN.run) in str(path)
    assert path.exists()


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
    assert definition_of(replace(table, fingerprint="elsewhere")) == definition_of(table)


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

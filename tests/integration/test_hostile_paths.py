"""No operation of a store leaves the lake, whatever path it is called with.

Here for the files of any lake. What names these paths is attacked for Delta logs in
tests/unit/lake/delta/test_hostile_log.py, for backfills in
tests/unit/spark_jobs/test_backfill_record.py.
"""

from __future__ import annotations

import inspect
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.lake.store.errors import storage_fault
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.paths import OddPathError, why_odd
from ingestd.lake.store.plain_files import Fsync
from ingestd.lake.store.store import Store, open_store
from ingestd.model.errors import FolderError
from tests.harness.object_store import ObjectStoreServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.attack("lake writer")
FOLDER = "shop/public/a"
FILE = f"{FOLDER}/part-1.parquet"
VICTIMS = ["../victim", f"{FOLDER}/../b/part-1.parquet", f"{FOLDER}/../../../../victim"]
PIECES = ["..", ".", "", "shop", "victim", "%2e%2e", "..%2fvictim", "..\\victim", "x\0", "x\n"]
ARGUMENTS = {"content": b"x", "most_bytes": 99, "above": "", "names": ["part-1.parquet"]}
OF_FOLDERS = {"uri", "make_folder", "entries", "folders", "files", "written", "sync"}
"""Operations for which an empty path means the lake's root."""


def operations() -> dict[str, str]:
    """Return the methods of a store that take a path, each with the name of that parameter."""
    found = {}
    for name, method in inspect.getmembers(Store, inspect.isfunction):
        parameters = list(inspect.signature(method).parameters)[1:]
        if not name.startswith("_") and parameters:
            found[name] = parameters[0]
    assert set(found.values()) == {"path", "folder"}
    assert found.keys() > OF_FOLDERS
    return found


def hostile_paths(root: str) -> list[str]:
    """Return paths of up to four pieces that are not all plain names, and some of real files."""
    made = {
        "/".join(pieces)
        for count in range(1, 5)
        for pieces in itertools.product(PIECES, repeat=count)
        if not {"shop", "victim"}.issuperset(pieces)
    }
    real = [*VICTIMS, root, f"{root}/{FILE}", f"{root}/../victim", f"{FILE}/", f"/{FILE}"]
    spelt = [
        victim.replace(plain, odd)
        for victim in VICTIMS
        for plain, odd in (("..", "%2e%2e"), ("/", "%2F"), ("/", "\\"))
    ]
    return sorted(made.union(real, spelt))


def call(store: Store, name: str, parameter: str, path: str) -> object:
    method = getattr(store, name)
    needed = list(inspect.signature(getattr(Store, name)).parameters)[1:]
    given: list[Any] = [path if p == parameter else ARGUMENTS[p] for p in needed]
    return method(*given)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStoreServer]:
    with ObjectStoreServer() as running:
        yield running


@pytest.fixture(params=["local", "obstore", "deltalake"])
def store(
    request: pytest.FixtureRequest, server: ObjectStoreServer, tmp_path: Path
) -> Iterator[Store]:
    """Yield a lake with a file in two tables, and a file next to it, which stay as they are."""
    if request.param == "local":
        around: Store = LocalStore(tmp_path, Fsync())
        found: Store = LocalStore(tmp_path / "lake", Fsync())
    else:
        server.begin_anew(by_deltalake=request.param == "deltalake")
        around = open_store(server.uri.rpartition("/")[0], server.options)
        found = open_store(server.uri, server.options)
    for path in (FILE, "shop/public/b/part-1.parquet"):
        found.make_folder(path.rpartition("/")[0])
        with found.create(path) as file:
            file.write(b"secret")
    with around.create("victim") as file:
        file.write(b"secret")
    yield found
    assert around.read("victim", 99) == b"secret"
    assert found.files(FOLDER) == found.files("shop/public/b") == ["part-1.parquet"]
    assert found.folders("") == ["shop"]
    assert found.files("") == []


@pytest.mark.parametrize("name", operations())
def test_no_operation_takes_a_path_out_of_the_lake(store: Store, name: str) -> None:
    parameter = operations()[name]
    paths = hostile_paths(store.uri(""))
    assert len(paths) > 5000
    for path in paths:
        if path or name not in OF_FOLDERS:
            with pytest.raises(OddPathError):
                call(store, name, parameter, path)


def test_no_file_is_synced_out_of_its_folder(store: Store) -> None:
    for path in hostile_paths(store.uri("")):
        with pytest.raises(OddPathError):
            store.sync(FOLDER, [path])


def test_an_ordinary_path_is_taken_by_each_operation(store: Store) -> None:
    for name, parameter in operations().items():
        if name in {"create", "put_if_absent", "remove", "remove_folder", "set_aside"}:
            continue
        call(store, name, parameter, FOLDER if name in OF_FOLDERS else FILE)


def test_names_that_no_path_may_have_are_not_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, Fsync())
    for name in ("plain", "a%b", "a\\b", "a\nb"):
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files" / name).write_text("x")
        (tmp_path / "folders" / name).mkdir(parents=True)
    assert store.files("files") == store.folders("folders") == ["plain"]
    assert list(store.written("files")) == ["plain"]


def test_the_fault_names_the_path_and_no_command_for_it() -> None:
    why = why_odd("../victim; rm -r /")
    assert why is not None
    fault = storage_fault(OddPathError("../victim; rm -r /", why), "/lake/shop/public/a")
    assert isinstance(fault, FolderError)
    assert "names the path '../victim; rm -r /', which may lead out of its folder" in fault.what
    assert "victim" not in str(fault.remedy)

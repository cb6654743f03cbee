"""The id file in a lake's root: written once, read exactly, never overwritten."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.lake.lake_id import read_lake_id, require_lake_id, write_lake_id
from ingestd.lake.store.local_store import ID_FILE as NAME
from ingestd.lake.store.object_store import ObjectStore
from ingestd.lake.store.store import Store, open_store
from ingestd.model.errors import LakeLostError, OperatorError
from tests.harness.examples import examples

if TYPE_CHECKING:
    from pathlib import Path

LAKE = "11111111-2222-3333-4444-555555555555"


@pytest.fixture(params=["local", "object store"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An object store is stood in for by deltalake's own file system."""
    if request.param == "local":
        return open_store(str(tmp_path / "lake"), None)
    (tmp_path / "lake").mkdir()
    return ObjectStore(f"file://{tmp_path / 'lake'}", None)


def test_an_id_is_written_once_and_read_back(store: Store, tmp_path: Path) -> None:
    assert read_lake_id(store) is None
    lake = write_lake_id(store)
    assert read_lake_id(store) == write_lake_id(store) == write_lake_id(store, LAKE) == lake
    content = json.loads((tmp_path / "lake" / NAME).read_text())
    assert content == {"format": 1, "lake": str(uuid.UUID(lake))}


def test_the_id_that_a_lake_had_is_kept(store: Store) -> None:
    assert write_lake_id(store, LAKE) == LAKE
    require_lake_id(store, LAKE)
    with pytest.raises(LakeLostError, match="another lake"):
        require_lake_id(store, str(uuid.uuid4()))


def test_an_id_that_is_missing_is_a_lost_lake(store: Store) -> None:
    with pytest.raises(LakeLostError, match="is missing"):
        require_lake_id(store)


def test_of_two_that_write_one_at_once_both_have_the_same(tmp_path: Path) -> None:
    stores = [open_store(str(tmp_path / "lake"), None) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(write_lake_id, stores))) == 1
    assert [path.name for path in (tmp_path / "lake").iterdir()] == [NAME]


def test_no_folder_is_made_where_the_id_file_was(tmp_path: Path) -> None:
    """An unmounted volume's folder is not filled."""
    store = open_store(str(tmp_path / "lake"), None)
    write_lake_id(store)
    store.needs_lake_id = True
    store.make_folder("shop/public")
    (tmp_path / "lake").rename(tmp_path / "away")
    with pytest.raises(LakeLostError):
        store.make_folder("shop/public/orders")
    (tmp_path / "lake").mkdir()
    with pytest.raises(LakeLostError):
        store.make_folder("shop")
    assert not list((tmp_path / "lake").iterdir())


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"{", "not JSON"),
        (b"[" * 60_000, "more than 1000 values"),
        (b"\x00" * 64, "not JSON"),
        (b" " * (1 << 17), "131072 bytes"),
        (b"null", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b"{}", '"format"'),
        (b'{"format": true, "lake": "x"}', '"format"'),
        (b'{"format": 0, "lake": "x"}', '"format"'),
        (b'{"format": 1.5, "lake": "x"}', '"format"'),
        (b'{"format": "1", "lake": "x"}', '"format"'),
        (b'{"format": 1}', '"lake" is not a UUID'),
        (b'{"format": 1, "lake": null}', '"lake" is not a UUID'),
        (b'{"format": 1, "lake": {}}', '"lake" is not a UUID'),
        (b'{"format": 1, "lake": "shop"}', '"lake" is not a UUID'),
        (b'{"format": 2}', "newer version"),
        (b'{"format": 99999999999999999999, "what": 1}', "newer version"),
    ],
)
def test_what_cannot_be_read_is_refused_and_left(
    store: Store, tmp_path: Path, content: bytes, told: str
) -> None:
    path = tmp_path / "lake" / NAME
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    for use in (read_lake_id, write_lake_id, require_lake_id):
        with pytest.raises(OperatorError, match=r"_ingestd\.json") as raised:
            use(store)
        assert told in raised.value.what
        assert raised.value.remedy
    assert path.read_bytes() == content


def test_a_folder_or_a_dangling_link_in_its_place_is_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), None)
    (tmp_path / NAME).mkdir()
    with pytest.raises(OperatorError, match="it is a folder"):
        write_lake_id(store)
    (tmp_path / NAME).rmdir()
    (tmp_path / NAME).symlink_to(tmp_path / "nowhere")
    with pytest.raises(OperatorError, match="it is a symbolic link"):
        write_lake_id(store)


def test_keys_that_a_later_version_adds_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps({"format": 1, "lake": LAKE.upper(), "more": [1]}))
    assert read_lake_id(open_store(str(tmp_path), None)) == LAKE


@examples(200)
@given(content=st.binary(max_size=80))
def test_only_an_operator_error_leaves_it(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / NAME).write_bytes(content)
    with pytest.raises(OperatorError):
        read_lake_id(open_store(str(folder), None))

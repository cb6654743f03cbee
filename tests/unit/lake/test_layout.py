"""Names to path segments (design section 2)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.lake.layout import Layout, name_of, segment
from ingestd.lake.store.plain_files import table_depth
from ingestd.model.errors import TableError
from ingestd.model.schema import TableId

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
tricky = st.text("_xX0159AFé. ", min_size=1)


@pytest.mark.parametrize(
    ("name", "mapped"),
    [
        ("Ünï Tbl", "_x00DC_n_x00EF__x0020_Tbl"),
        ("_epochs", "_x005F_epochs"),
        (".hidden", "_x002E_hidden"),
        ("..", "_x002E_."),
        ("a_x0020_b", "a_x005F_x0020_b"),
        ("_x", "_x005F_x"),
        ("orders", "orders"),
        ("2024-q1.v2_final", "2024-q1.v2_final"),
        ("a/b%c", "a_x002F_b_x0025_c"),
        ("😀", "_x1F600_"),
    ],
)
def test_segment(name: str, mapped: str) -> None:
    assert segment(name) == mapped
    assert name_of(mapped) == name


@given(names | tricky)
def test_a_segment_gives_back_its_name_and_is_safe(name: str) -> None:
    mapped = segment(name)
    assert name_of(mapped) == name
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", mapped)
    assert mapped not in {".", "..", "_epochs", "_tables", "_ref"}


ANY_TEXT = st.text(st.characters(categories=["L", "N", "P", "Cs", "Cc"])) | st.text("_xX0159AFDé.8")


@given(ANY_TEXT | st.from_regex(r"_x[0-9A-F]{4,6}_", fullmatch=True))
@pytest.mark.attack("lake writer")
def test_any_folder_is_that_of_one_name_or_of_none(path_segment: str) -> None:
    name = name_of(path_segment)
    assert name is None or segment(name) == path_segment
    assert name is None or name.encode()
    table = Layout("shop").table_of("public", path_segment)
    assert (table is None) == (name is None)


@pytest.mark.parametrize(
    "path_segment",
    ["", "_x110000_", "_xFFFFFF_", "_xD800_", "_x0000_", "_x0041_", "_x000041_", "_a", "ü", "a b"],
)
def test_a_folder_that_no_name_has_is_of_none(path_segment: str) -> None:
    assert name_of(path_segment) is None


@given(names)
def test_links_lead_to_a_table_whatever_its_name(name: str) -> None:
    for folders in (["shop", segment(name), "t"], ["shop", "_ref", segment(name), "t"]):
        assert table_depth([*folders, "_delta_log", "0.json"]) == len(folders)
        assert table_depth([*folders, "part-0.parquet"]) == len(folders)
    assert table_depth([segment(name), "_epochs", "_delta_log", "0.json"]) == 2


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        segment("")


def test_layout() -> None:
    layout = Layout("shop")
    table = TableId("public", "Ünï Tbl")
    assert layout.raw(table) == "shop/public/_x00DC_n_x00EF__x0020_Tbl"
    assert layout.table_of("public", "_x00DC_n_x00EF__x0020_Tbl") == table
    assert (layout.epochs, layout.tables) == ("shop/_epochs", "shop/_tables")
    assert layout.app_id(table) == "ingestd/shop/public.Ünï Tbl"


def test_isolated_a_name_too_long_stops_its_table() -> None:
    with pytest.raises(TableError, match="255"):
        Layout("shop").raw(TableId("public", "é" * 40))
    assert Layout("shop").raw(TableId("public", "e" * 255))

"""What `ingestd tables` prints, and the grids it is made of."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from ingestd.terminal.grid import Grid
from ingestd.terminal.tables import print_tables


def printed(document: dict[str, Any], *, columns: bool = False) -> list[str]:
    file = io.StringIO()
    print_tables(document, columns=columns, console=Console(file=file, highlight=False))
    return file.getvalue().splitlines()


def table(name: str, **more: Any) -> dict[str, Any]:
    column = {
        "name": "id",
        "type": "bigint",
        "nullable": False,
        "comment": "a\n\x1b[31m",
        "null_fraction": 0.125,
        "distinct": 123.0,
        "lake_name": "id__v2",
        "lake_type": "string",
        "mask": "sha256",
    }
    note = {**column, "name": "note", "nullable": True, "comment": None, "null_fraction": None}
    note |= {"distinct": None, "lake_name": None, "lake_type": None, "mask": None}
    return {
        "table": name,
        "comment": None,
        "rows": 12345,
        "bytes": 1_500_000,
        "key": ["id"],
        "replica_identity": "default",
        "captured": True,
        "state": "live",
        "snapshot_progress": None,
        "reason": None,
        "remedy": None,
        "columns": [column, note],
        **more,
    }


def of(*tables: dict[str, Any], faults: tuple[str, ...] = ()) -> dict[str, Any]:
    found = [{"what": f, "remedy": None} for f in faults]
    return {"sources": {"shop": {"schemas": [], "tables": list(tables), "faults": found}}}


def test_a_line_for_each_table() -> None:
    absent: dict[str, Any] = {
        "rows": None,
        "bytes": None,
        "key": [],
        "replica_identity": None,
        "state": None,
    }
    assert printed(of(table("public.orders"), table("x", **absent))) == [
        "table            rows    size  key  identity  captured",
        "public.orders  12,345  1.5 MB  id   default   live",
        "x                   -       -  -    -         not yet read",
    ]


def test_tables_with_the_same_reason_are_listed_once() -> None:
    remedy = "ALTER TABLE " + "long " * 60 + ";"
    no = {"captured": False, "state": None, "reason": "no [key]", "remedy": remedy}
    tables = [table(f"t{n}", **no) for n in range(7)]
    tables.append(table("u", captured=None, reason="could not be determined"))
    lines = printed(of(*tables))[9:]
    assert lines == [
        "not captured: t0, t1, t2, t3, t4 and 2 more: no [key]",
        f"  remedy: {remedy}",
        "not known: u: could not be determined",
    ]


def test_columns_stand_below_their_table() -> None:
    lines = printed(of(table("public.orders")), columns=True)[3:]
    assert lines == [
        "public.orders",
        "  column  type    null      key  nulls  distinct  in the lake                     comment",
        "  id      bigint  not null    1  12.5%       123  id__v2 string, masked (sha256)  a  [31m",
        "  note    bigint                     -         -  excluded",
    ]


def test_a_comment_is_shown_where_there_is_one() -> None:
    lines = printed(of(table("a", comment="who buys"), table("b")))
    assert lines[0].endswith("  comment")
    assert lines[1].endswith("  who buys")


def test_a_snapshot_under_way_tells_how_far_it_is() -> None:
    lines = printed(of(table("a", state="snapshotting", snapshot_progress=0.421)))
    assert lines[1].endswith("  snapshotting 42%")


def test_nothing_found_differs_from_nothing_known() -> None:
    assert printed(of()) == ["no tables"]
    assert printed(of(faults=("lost",))) == ["not known"]


def test_wide_letters_keep_the_columns_straight() -> None:
    grid = Grid(["name", "n"], [["表", "1"], ["ab", "20"]], {"n"})
    assert list(grid.lines()) == ["name   n", "表     1", "ab    20"]


def test_a_terminal_gets_every_text_without_markup_being_read() -> None:
    file = io.StringIO()
    out = Console(file=file, force_terminal=True, width=40, color_system=None)
    Grid(["name", "n"], [["[b]x[/b]", "1"]], {"n"}).print(out, indent=2)
    head, row = file.getvalue().splitlines()
    assert head.split() == ["name", "n"]
    assert row.startswith("  [b]x[/b]")

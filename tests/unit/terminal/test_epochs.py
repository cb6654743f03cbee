"""How epochs and changes are printed, on a terminal of 80 columns."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from ingestd.terminal.epochs import print_changes, print_epochs

COLUMNS = 80
EPOCH = {
    "epoch": 123_456,
    "end_lsn": "1A/19A08B8",
    "transactions": 12_345,
    "rows": 1_234_567,
    "bytes": 80_700_000,
    "committed_at": "2026-11-22T22:57:36.5+00:00",
    "tables": [{"table": f"public.with_a_long_name_{n}"} for n in range(3)],
}
CHANGE: dict[str, Any] = {
    "op": "u",
    "lsn": "0/1",
    "seq": 1,
    "ts": "2026-11-22T22:57:36.123456+00:00",
    "epoch": 3,
    "columns": {"id": 1, "note": "x" * 200, "gone": None, "odd\x1b[2J": "a\nb", "big": None},
    "before": {"id": 2},
    "unchanged": ["big"],
    "raw": {},
}


def terminal() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=True, width=COLUMNS, color_system=None), text


def test_an_epoch_is_a_line_and_names_are_cut() -> None:
    console, text = terminal()
    print_epochs({"epochs": [EPOCH, {**EPOCH, "tables": None}]}, console)
    lines = text.getvalue().splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= COLUMNS
    assert "123456  1A/19A08B8  12,345  1,234,567  80.7 MB  2026-11-22 22:57:36  " in lines[1]
    assert lines[1].endswith("…")


def test_values_are_wrapped_between_and_long_ones_cut() -> None:
    console, text = terminal()
    print_changes({"changes": [CHANGE]}, console)
    first, *lines = text.getvalue().splitlines()
    assert first == "update  0/1 #1  2026-11-22 22:57:36.123  epoch 3"
    assert max(map(len, lines)) <= COLUMNS
    shown = " ".join(line.strip() for line in lines)
    assert "gone null" in shown
    assert "big (unchanged)" in shown
    assert 'odd [2J "a\\nb"' in shown  # nothing that a terminal would obey
    assert "\x1b" not in text.getvalue()
    assert lines[-1] == "  before: id 2"


@pytest.mark.parametrize(("op", "shown"), [("d", False), ("t", False), ("c", True), ("r", True)])
def test_nulls_are_shown_only_of_existing_rows(op: str, shown: bool) -> None:  # noqa: FBT001
    console, text = terminal()
    print_changes({"changes": [{**CHANGE, "op": op, "before": None}]}, console)
    assert ("gone null" in text.getvalue()) is shown

"""The last epochs and changes, as text."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ingestd.model.printable_text import printable
from ingestd.terminal.grid import Grid
from ingestd.terminal.status import size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_NAMED = 2
_WIDTH = 80
_LONGEST = 60
"""Characters of a value that are shown; --json shows all."""
_STYLES = {"c": "green", "u": "yellow", "d": "red", "t": "bold red"}
_OPS = {"r": "read", "c": "insert", "u": "update", "d": "delete", "t": "void"}


def print_epochs(document: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a document of `ingestd.app.peek.last_epochs`."""
    out = console or Console(highlight=False, emoji=False)
    if not document["epochs"]:
        out.print("no epochs yet")
        return
    rows = [
        [
            str(epoch["epoch"]),
            epoch["end_lsn"],
            f"{epoch['transactions']:,}",
            f"{epoch['rows']:,}",
            size(epoch["bytes"]),
            _moment(epoch["committed_at"], "seconds"),
            _named([table["table"] for table in epoch["tables"] or ()]),
        ]
        for epoch in document["epochs"]
    ]
    headings = ["epoch", "end_lsn", "txns", "rows", "size", "committed_at", "tables"]
    grid = Grid(headings, rows, {"epoch", "txns", "rows", "size"})
    if not out.is_terminal:
        grid.print(out)
        return
    for line in grid.lines():  # the names at the end may be too long: cut, not folded
        out.print(Text(line), no_wrap=True, overflow="ellipsis")


def _named(names: Sequence[str]) -> str:
    more = f" +{len(names) - _NAMED}" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def print_changes(document: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a document of `ingestd.app.peek.last_changes`."""
    out = console or Console(highlight=False, emoji=False)
    if not document["changes"]:
        out.print("no changes yet")
    for change in document["changes"]:
        op = change["op"]
        at = _moment(change["ts"])
        place = f"{change['lsn']} #{change['seq']}  {at}  epoch {change['epoch']}"
        head = Text(f"{_OPS.get(op, op):<6}  {place}", style=_STYLES.get(op, ""))
        out.print(head, soft_wrap=True)
        for line in _lines(change, out.width if out.is_terminal else _WIDTH):
            out.print(Text(line), soft_wrap=True)


def _moment(text: str | None, precision: str = "milliseconds") -> str:
    """Return a time of the document, in UTC, with a fixed number of digits; "-" for none."""
    if text is None:
        return "-"
    moment = datetime.fromisoformat(text).replace(tzinfo=None)
    return moment.isoformat(" ", precision)


def _lines(change: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield lines of a change's values, wrapped only between values."""
    parts = [f"{name} {_value(change, name, value)}" for name, value in _shown_values(change)]
    before = [f"{name} {_shown(value)}" for name, value in (change["before"] or {}).items()]
    for label, found in (("", parts), ("before: ", before)):
        line = "  " + label
        for number, part in enumerate(map(printable, found)):
            end = "" if number == len(found) - 1 else ", "
            if len(line) + len(part) + 1 > width and line.strip():
                yield line.rstrip()
                line = "    "
            line += part + end
        if found:
            yield line.rstrip()


def _shown_values(change: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the columns with a value; deleted rows have only their identity."""
    for name, value in change["columns"].items():
        is_listed = name in change["unchanged"] or name in change["raw"]
        if value is not None or is_listed or change["op"] not in {"d", "t"}:
            yield name, value


def _value(change: Mapping[str, Any], name: str, value: object) -> str:
    if name in change["raw"]:
        return f"{_shown(change['raw'][name])} (raw)"
    return "(unchanged)" if name in change["unchanged"] else _shown(value)


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

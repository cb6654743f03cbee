"""The tables of a source and whether they are captured, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ingestd.model.printable_text import printable, printable_lines
from ingestd.terminal.grid import Grid
from ingestd.terminal.status import size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_STYLES = {"live": "green", "stopped": "red", "snapshotting": "yellow"}
_NAMED = 5
"""How many tables with the same reason are named."""


def print_tables(
    document: Mapping[str, Any], *, columns: bool, console: Console | None = None
) -> None:
    """Print a document of `ingestd.app.table_report.report_to_json`."""
    out = console or Console(highlight=False, emoji=False)
    sources = document["sources"]
    for number, (name, source) in enumerate(sources.items()):
        if number:
            out.print()
        if len(sources) > 1:
            out.print(Text(f"source {name}", style="bold"))
        if not source["tables"]:
            out.print("not known" if source["faults"] else "no tables")
            continue
        _tables(source["tables"]).print(out)
        _print_reasons(out, source["tables"])
        if columns:
            _print_columns(out, source["tables"])


def _tables(tables: Sequence[Mapping[str, Any]]) -> Grid:
    headings = ["table", "rows", "size", "key", "identity", "captured"]
    has_comments = any(table["comment"] for table in tables)
    rows = []
    for table in tables:
        row = [
            table["table"],
            "-" if table["rows"] is None else f"{table['rows']:,}",
            size(table["bytes"]),
            ", ".join(table["key"]) or "-",
            table["replica_identity"] or "-",
            _captured(table),
        ]
        rows.append([*row, table["comment"] or ""] if has_comments else row)
    if has_comments:
        headings.append("comment")
    return Grid(headings, rows, {"rows", "size"}, _STYLES)


def _captured(table: Mapping[str, Any]) -> str:
    """Return a table's capture state in a few words; its reason is printed below the table."""
    if table["captured"]:
        progress = table["snapshot_progress"]
        read = "" if progress is None else f" {progress:.0%}"
        return (table["state"] or "not yet read") + read
    if table["captured"] is None:
        return "?"
    return "stopped" if table["state"] == "stopped" else "no"


def _print_reasons(out: Console, tables: Iterable[Mapping[str, Any]]) -> None:
    """Print why tables are not captured, once for all tables with the same reason and remedy."""
    shared: dict[tuple[str, str, str | None], list[str]] = {}
    for table in tables:
        if table["reason"] is not None:
            what = "not known" if table["captured"] is None else "not captured"
            shared.setdefault((what, table["reason"], table["remedy"]), []).append(table["table"])
    for (what, reason, remedy), names in shared.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        listed = printable(", ".join(names[:_NAMED])) + more
        # unwrapped and without markup, so that a remedy can be pasted
        out.print(Text(printable(f"{what}: {listed}: {reason}")), soft_wrap=True)
        if remedy:
            out.print(Text(printable_lines(f"  remedy: {remedy}")), soft_wrap=True)


def _print_columns(out: Console, tables: Iterable[Mapping[str, Any]]) -> None:
    for table in tables:
        if table["columns"]:
            out.print()
            out.print(Text(printable(table["table"]), style="bold"), soft_wrap=True)
            _columns(table).print(out, indent=2)


def _columns(table: Mapping[str, Any]) -> Grid:
    headings = ["column", "type", "null", "key", "nulls", "distinct", "in the lake", "comment"]
    rows = []
    for column in table["columns"]:
        name = column["name"]
        nulls, distinct = column["null_fraction"], column["distinct"]
        place = table["key"].index(name) + 1 if name in table["key"] else None
        rows.append(
            [
                name,
                column["type"],
                "" if column["nullable"] else "not null",
                "" if place is None else str(place),
                "-" if nulls is None else f"{nulls:.1%}",
                "-" if distinct is None else f"{distinct:,.0f}",
                _in_the_lake(column) if table["captured"] else "",
                column["comment"] or "",
            ]
        )
    return Grid(headings, rows, {"key", "nulls", "distinct"})


def _in_the_lake(column: Mapping[str, Any]) -> str:
    """Return how a column of a captured table is stored."""
    if column["lake_name"] is None:
        return "excluded"
    is_renamed = column["lake_name"] != column["name"]
    name = f"{column['lake_name']} " if is_renamed else ""
    mask = "" if column["mask"] is None else f", masked ({column['mask']})"
    return f"{name}{column['lake_type']}{mask}"

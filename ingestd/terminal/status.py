"""A status as text tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingestd.model.printable_text import printable, printable_lines

if TYPE_CHECKING:
    from collections.abc import Mapping

_STATE_STYLES = {"streaming": "green", "live": "green", "stopped": "red", "backing_off": "yellow"}
_UNITS = ("B", "kB", "MB", "GB", "TB")
_STEP = 1000
_MINUTE, _HOUR = 60, 3600
_PIPE_WIDTH = 200


def print_status(status: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a status of `ingestd.observe.status_json.to_json`."""
    out = console or Console(highlight=False)
    if not out.is_terminal:
        out.width = _PIPE_WIDTH
    if status.get("offline"):
        _print(out, f"{status['offline']}. From slot and lake:")
    else:
        out.print(f"ingestd {status.get('version', '')}, since {_text(status.get('started_at'))}")
    out.print(_sources(status["sources"]))
    for name, source in status["sources"].items():
        _print_pause(out, name, source)
        _print_faults(out, name, source)
        _print_snapshots(out, name, source)


def _sources(sources: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("source", "state", "tables", "lag", "epoch", "rows", "p50/p99", "last commit"):
        numeric = name in {"lag", "epoch", "rows", "p50/p99"}
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    for name, source in sources.items():
        state = str(source["state"])
        quantiles = (source["freshness_p50_seconds"], source["freshness_p99_seconds"])
        table.add_row(
            Text(name),
            Text(state, style=_STATE_STYLES.get(state, "")),
            _tables(source["tables"]),
            size(source["lag_bytes"]),
            _text(source["epoch"]),
            _text(source["rows"]),
            "/".join(_seconds(q) for q in quantiles),
            _text(source["last_commit"])[:19].replace("T", " "),
        )
    return table


def _tables(tables: list[Mapping[str, Any]]) -> str:
    live = sum(t["state"] == "live" for t in tables)
    return f"{live}/{len(tables)} live" if tables else "-"


def _print_pause(out: Console, name: str, source: Mapping[str, Any]) -> None:
    if source["state"] != "paused":
        return
    since = _text(source["since"])[:19].replace("T", " ")
    kept = source["retained_bytes"]
    wal = "" if kept is None else f"; its slot retains {size(kept)} of WAL"
    out.print(Text(f"source {name} has been paused since {since} UTC{wal}"), soft_wrap=True)
    out.print(Text(f"  resume with: ingestd resume {name}"), soft_wrap=True)


def _print_faults(out: Console, name: str, source: Mapping[str, Any]) -> None:
    faults = [(f"source {name}", source)]
    faults += [(f"source {name}, table {printable(t['table'])}", t) for t in source["tables"]]
    listed = {t["table"] for t in source["tables"] if t["state"] == "stopped" and t["reason"]}
    for reference in source.get("references", ()):
        if reference["table"] not in listed:
            where = f"source {name}, reference table {printable(reference['table'])}"
            faults.append((where, reference))
    for where, fault in faults:
        is_shown_below = fault["state"] == "snapshotting" and fault.get("snapshot")
        if fault["reason"] and not is_shown_below:
            _print(out, f"{where} is {fault['state']}: {fault['reason']}")
            if fault["remedy"]:
                _print(out, f"  remedy: {fault['remedy']}")
    for notice in source.get("notices", ()):
        _print(out, f"source {name}: {notice['reason']}")
        _print(out, f"  remedy: {notice['remedy']}")


def _print(out: Console, text: str) -> None:
    """Print unwrapped and without markup, so that a remedy can be pasted."""
    out.print(Text(printable_lines(text)), soft_wrap=True)


def _print_snapshots(out: Console, name: str, source: Mapping[str, Any]) -> None:
    for table in source["tables"]:
        where = f"source {name}, table {printable(table['table'])} is {table['state']}"
        if table["snapshot_requested"]:
            _print(out, f"{where}: a new snapshot is requested")
        elif table["snapshot"] is not None:
            why = f"; {table['reason']}" if table["reason"] else ""
            _print(out, f"{where}: {_read(table['snapshot'])}{why}")
        elif (last := table["last_snapshot"]) and last["outcome"] == "failed":
            failed = f"{where}: its last snapshot failed: {last['reason']}"
            _print(out, failed)
            if last["remedy"]:
                _print(out, f"  remedy: {last['remedy']}")


def _read(snapshot: Mapping[str, Any]) -> str:
    eta_s = snapshot["eta_s"]
    left = "" if eta_s is None else f", {duration(eta_s)} left"
    return f"{snapshot['ratio']:.0%} read{left}"


def size(nbytes: float | None) -> str:
    """Return bytes as text with a decimal unit; "-" for None."""
    if nbytes is None:
        return "-"
    for unit in _UNITS:
        if abs(nbytes) < _STEP or unit == _UNITS[-1]:
            break
        nbytes /= _STEP
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"


def duration(seconds: float) -> str:
    """Return a duration as text, in its two largest units."""
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} m {whole % _MINUTE:02} s"
    hours, minutes = whole // _HOUR, whole % _HOUR // _MINUTE
    return f"{hours} h {minutes:02} m"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}s"


def _text(value: object) -> str:
    return "-" if value is None else str(value)

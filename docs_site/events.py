"""docs/reference/events.md: every event of the log, found by walking the code for calls of a log.

What an event means is in `MEANINGS`; an event without a meaning, or the reverse, is an error.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from docs_site.markdown import MADE_BY, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MEANINGS: Mapping[str, str] = {
    "catch_up.refused": "A backlog is streamed instead of drained, which takes longer: the server"
    " refused, or would read much WAL anew. It is looked at again after 5 minutes to an hour.",
    "config.failed": "A reload ended by an error that was not foreseen; some sources may not be begun"
    " again. A fault of the program: please report it.",
    "config.needs_restart": "The config was read anew, and these `keys` differ; the old ones hold until"
    " the daemon is started anew.",
    "config.pause_unknown": "After a reload it could not be seen in the lake whether a source is"
    " paused; what was known holds.",
    "config.refused": "SIGHUP came, and the config file has `problems`, each with its key. Nothing has"
    " changed.",
    "config.reloaded": "SIGHUP came, and the config was read anew: which sources are `added`,"
    " `removed`, `changed` (begun again).",
    "daemon.cut_off": "A stop took longer than 9.5 s: the process ends with exit code 75, and `under_way`"
    " says what was not waited for. Nothing is lost: what was not committed is read again.",
    "daemon.started": "All is built; the sources begin. `compiled`: whether the part in C is there, which decodes faster.",
    "daemon.stopped": "Every source is closed, after SIGTERM or SIGINT.",
    "ddl_log.incomplete": "The event triggers of `ddl_log` are missing, disabled, altered or older than this"
    " daemon's; catalog checks alone are what counts. `remedy` puts it right; nothing else has to be done.",
    "epoch.committed": "An epoch is durable: raw tables and `_epochs`. Of each epoch one line.",
    "epoch.files_left": "An epoch was given up, and its files could not be removed. Nothing reads"
    " them; maintenance does it later.",
    "failpoint.reached": "A failpoint acted. Only with `INGESTD_FAILPOINTS` set, in tests.",
    "failpoints.on": "Failpoints are set: this daemon fails on purpose. Never in production.",
    "http.bad_request": "Requests came that are not HTTP: `count` of them since the last such line, of"
    " which there is one a minute at most.",
    "http.commands_off": "There is no folder for the token of commands: `ingestd snapshot`, `pause` and"
    " `resume` are refused; reading is not. `remedy` says what to set.",
    "http.listening": "Where metrics, health and status are served.",
    "http.open": "Others than this machine can reach it, and something is not protected. `reason`"
    " says what.",
    "lake.file_set_aside": "A power cut left a file half written; what it held comes again.",
    "lake.foreign_commit": "Another program wrote to a raw table. Stop it, then have the table read"
    " anew.",
    "claim.not_ended": "A session that the last holder of the claim left can't be ended by this role:"
    " it may keep the slot until the server gives it up.",
    "claim.session_ended": "A session that the last holder of the claim left at the slot was ended,"
    " `pid` its process: that daemon was frozen, cut off or killed.",
    "lake.taken_over": "Another slot, or database that is polled, wrote this lake last. Its daemon"
    " stops, if it runs; a slot keeps WAL until somebody drops it.",
    "maintenance.done": "Small files were joined, old ones removed.",
    "maintenance.failed": "A look at the lake failed; it is tried again. Once until one succeeds.",
    "object.failed": "An object could not be cleared up; its error. A fault of the program.",
    "page.failed": "The status page is told nothing any more; all else goes on.",
    "reference.committed": "A reference table has a new version.",
    "reference.retried": "A reference table could not be read now; it is tried again.",
    "reference.stopped": "A reference table can't go on. Do what `remedy` says.",
    "service_manager.unreachable": "systemd's socket does not take what it is told.",
    "snapshot.cancelled": "Somebody gave up the snapshots of these tables.",
    "snapshot.failed": "A snapshot can't be read; its table goes on as before.",
    "snapshot.request_lost": "A snapshot was asked for, and the source began anew before it was"
    " read. Ask again.",
    "snapshot.requested": "Somebody asked for these tables to be read anew; `partial`: for some of"
    " their rows.",
    "snapshot.retried": "Tables could not be read now; they will be. The stream goes on.",
    "snapshot.waiting": "Reading, or the stream of a new slot, can't begin before older transactions end (`remedy` finds them), nor on a standby before its primary has logged which run.",
    "slot.not_moved": "The server has no connection free by which the slot would be moved on while a"
    " backlog is drained; it keeps more WAL until then. Once, until it moves.",
    "source.discovered": "What lake and source have, at each start of a source.",
    "source.encoding": "The database has values in an encoding that only the server converts.",
    "source.failed": "A source can't go on: `state` is backing_off (passes by itself) or stopped (a"
    " person must act). Once for each change of state.",
    "source.first_start": "The lake has nothing of the source: it is begun there, and all its tables are"
    " read. Of a polled source nothing may tell whether another lake had it.",
    "source.held": "What is kept for a paused source, in bytes of WAL: when it is paused, then every"
    " hour.",
    "source.lag_unknown": "The lag can't be measured. Once until it can be again.",
    "source.lake_lost": "The lake is empty, another one or an older copy, and it was agreed"
    " (`lake_lost`, `--accept-empty-lake`) that every table is read again.",
    "source.paused": "Somebody paused the source, `since` then; it delivers nothing until it is"
    " resumed.",
    "source.removed": "A reload found the source gone from the config. Its slot stays, and keeps WAL:"
    " drop it if the source is not to come back.",
    "source.resumed": "A paused source goes on where it was.",
    "source.slot_lost": "The stream can't go on where the lake ends; every table is read anew.",
    "source.state": "A source has another state.",
    "source.synchronous": "The server may choose the stream as a synchronous standby: commits of the"
    " source would wait until their changes are durable in the lake.",
    "source.unknown_error": "An unforeseen error, and where it arose. A fault of the program: please"
    " report it.",
    "storage.answered": "The call of `storage.waits` came back.",
    "storage.waits": "A call of the lake's storage has not come back for 15 s: `path`. The source is not"
    " ready; it goes on when the call does.",
    "table.raw_values": "A column has values that its lake type can't hold; they are in `_cdc_raw`."
    " Once for each column.",
    "table.state": "A table has another state; `reason`: why it is read anew.",
    "table.stopped": "One table can't go on; the others do. Do what `remedy` says.",
    "tables.unmatched": "A pattern in `tables`, or a table's section, is for no table"
    " that exists at present.",
    "task.failed": "A task of the event loop ended by an error that nobody took. A fault of the"
    " program.",
    "thread.failed": "A thread ended by an error. A fault of the program.",
    "tls.read_by_libpq": "Functions of libpq or its OpenSSL were not found, so libpq reads over TLS:"
    " it buffers each row as a whole, however large. Once, at the level `debug`.",
    "tls.weak": "The DSN asks for less than a verified server: it could be anyone.",
    "watch.refused": "The server takes no second connection that could be asked what the first one"
    " does, so a connection that hangs alone is not noticed; a server that is out of reach is. Once.",
}
OF_JOBS: Mapping[str, str] = {
    "JOB.moved": "The tables are at another epoch, all in step. `JOB` is `mirror` or `history`.",
    "raw.files_gone": "Files that a raw table's log names are gone; it is tried without them.",
    "mirror.rebuilding": "A mirror is made anew, as `reason` says.",
    "table.resumed": "A table that had stopped goes on.",
    "table.stopped": "One table can't go on; the others do. Do what `remedy` says.",
}
"""The same of the Spark jobs."""
_LEVELS = ("debug", "info", "warning", "error", "critical")
_NAME = re.compile(r"[a-z_]+\.[a-z_]+\Z")
_INTRO = """# Log events

Logs go to stderr, one line each: JSON, or for a person where stderr is a terminal (`[log]`). `event`
is a constant name; the rest are its facts. `timestamp` (UTC) and `level` are on every line, `source`
where one is concerned. There are no values of rows and no secrets, and one line for each change of
state, never for each attempt. Libraries' warnings come as lines whose `event` is their text.

| level | when |
|---|---|
| info | what happens |
| warning | something is amiss, and goes by itself or can wait |
| error | a person must act, or the program has a fault |

"""


@dataclass(slots=True)
class Event:
    """What the code says of an event: the levels and facts of all calls."""

    levels: set[str] = field(default_factory=set)
    facts: dict[str, None] = field(default_factory=dict)


def page(daemon: Path, jobs: Path) -> str:
    """Give the page of both packages.

    Raises ValueError if an event lacks a meaning, or a meaning its event.
    """
    return (
        f"{MADE_BY}{_INTRO}{_table(daemon, MEANINGS)}\n## Of Spark jobs\n\n{_table(jobs, OF_JOBS)}"
    )


def _table(package: Path, meanings: Mapping[str, str]) -> str:
    found = events(package)
    problems = [
        f"{n}: no meaning in docs_site/events.py" for n in sorted(set(found) - set(meanings))
    ]
    problems += [f"{n}: no such event any more" for n in sorted(set(meanings) - set(found))]
    if problems:
        raise ValueError("; ".join(problems))
    rows = [
        (
            f"`{name}`",
            " or ".join(sorted(event.levels, key=_LEVELS.index)),
            ", ".join(f"`{fact}`" for fact in event.facts),
            meanings[name],
        )
        for name, event in sorted(found.items())
    ]
    return table(("event", "level", "facts", "meaning"), rows)


def events(package: Path) -> dict[str, Event]:
    """Give every event that the package's code logs, by name."""
    found: dict[str, Event] = {}
    for path in sorted(package.rglob("*.py")):
        if {"testing", "demo"} & {*path.parts}:
            continue
        tree = ast.parse(path.read_text("utf-8"))
        bound = [*_bound(tree), *chain(*map(_bound, _modules_of_bases(tree, package)))]
        for name, levels, facts in _calls(tree, bound):
            event = found.setdefault(name, Event())
            event.levels |= levels
            event.facts |= dict.fromkeys(facts)
    return found


def _bound(tree: ast.Module) -> list[str]:
    """Give what a module binds to its own log."""
    return [k.arg for c in ast.walk(tree) if _attribute(c) == "bind" for k in _keywords(c) if k.arg]


def _modules_of_bases(tree: ast.Module, package: Path) -> Iterator[ast.Module]:
    """Give the modules of ours from which a module's classes derive: the log is theirs."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {base.id for c in classes for base in c.bases if isinstance(base, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and bases & {alias.name for alias in node.names}:
            path = package.parent / f"{(node.module or '').replace('.', '/')}.py"
            if path.exists():
                yield ast.parse(path.read_text("utf-8"))


def _calls(tree: ast.Module, bound: list[str]) -> Iterator[tuple[str, set[str], list[str]]]:
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in ast.walk(scope):
            if not isinstance(call, ast.Call) or not (name := _name(call)):
                continue
            if levels := _levels(call, scope):
                of_logger = bound if _is_own_log(call) else []
                yield name, levels, [*of_logger, *_facts(call, scope)]


def _name(call: ast.Call) -> str | None:
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        return first.value if _NAME.match(first.value) else None
    if isinstance(first, ast.JoinedStr) and isinstance(end := first.values[-1], ast.Constant):
        name = f"job{end.value!s}"
        return f"JOB{end.value!s}" if _NAME.match(name) else None  # `mirror.moved`, `history.moved`
    return None


def _levels(call: ast.Call, scope: ast.AST) -> set[str]:
    if _attribute(call) in _LEVELS:
        return {_attribute(call)}
    if not isinstance(call.func, ast.Name):
        return set()
    if call.func.id == "Notice":  # of the lake: `Watch.noticed` logs it
        return {"warning"}
    return {
        part.attr
        for made in ast.walk(scope)
        if isinstance(made, ast.Assign) and _targets(made) == [call.func.id]
        for part in ast.walk(made.value)
        if isinstance(part, ast.Attribute) and part.attr in _LEVELS
    }


def _facts(call: ast.Call, scope: ast.AST) -> Iterator[str]:
    if isinstance(call.func, ast.Name) and call.func.id == "Notice":
        yield from ("source", "reason", "remedy")
    for keyword in call.keywords:
        if keyword.arg == "exc_info":
            yield "exception"
        elif keyword.arg is not None:
            yield keyword.arg
        elif isinstance(keyword.value, ast.Name):
            yield from _keys_of(keyword.value.id, scope)


def _keys_of(name: str, scope: ast.AST) -> Iterator[str]:
    for made in ast.walk(scope):
        if isinstance(made, ast.Assign) and _targets(made) == [name]:
            for part in ast.walk(made.value):
                if isinstance(part, ast.Dict):
                    yield from (k.value for k in part.keys if isinstance(k, ast.Constant))  # type: ignore[misc]


def _is_own_log(call: ast.Call) -> bool:
    """Say whether it is a log that was bound to its source: `self._log`, or made of it."""
    return isinstance(call.func, ast.Name) or (
        isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Attribute)
        and call.func.value.attr == "_log"
    )


def _attribute(node: ast.AST) -> str:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.attr if is_call else ""  # type: ignore[attr-defined]


def _keywords(node: ast.AST) -> list[ast.keyword]:
    return node.keywords if isinstance(node, ast.Call) else []


def _targets(made: ast.Assign) -> list[str]:
    return [t.id for t in made.targets if isinstance(t, ast.Name)]

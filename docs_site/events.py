"""docs/reference/events.md: every log event, found by walking the code for calls of a log.

The meaning of each event is in `MEANINGS`; an event without a meaning, or the reverse, is an error.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING

from docs_site.markdown import MADE_BY, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MEANINGS: Mapping[str, str] = {
    "catalog.failed": "The catalog of `[catalog]` can't be used, or refused `faults` names; the lake is not"
    " concerned. Retried after 30 s, then less and less often.",
    "catalog.registered": "Names in the catalog were `created`, `updated` or `removed`; now it has `tables`.",
    "catch_up.refused": "A backlog is streamed instead of drained, which takes longer: the server"
    " refused, or would re-read much WAL. Checked again after 5 minutes to an hour.",
    "config.failed": "A reload ended with an unexpected error; some sources may not have been restarted."
    " A fault of the program: please report it.",
    "config.needs_restart": "The config was re-read, and these `keys` differ; the old values hold until"
    " the daemon is restarted.",
    "config.pause_unknown": "After a reload the lake could not be read to find out whether a source is"
    " paused; the previous state holds.",
    "config.refused": "After SIGHUP the config file has `problems`, each with its key. Nothing has"
    " changed.",
    "config.reloaded": "The config was re-read after SIGHUP; the sources that were `added`,"
    " `removed`, `changed` (restarted).",
    "daemon.cut_off": "A stop took longer than 9.5 s: the process ends with exit code 75, and `under_way`"
    " lists unfinished work. Nothing is lost: uncommitted changes are read again.",
    "daemon.started": "The daemon has started; the sources begin. `compiled`: whether the C extension is available, which decodes faster.",
    "daemon.stopped": "Every source is closed, after SIGTERM or SIGINT.",
    "ddl_log.incomplete": "The event triggers of `ddl_log` are missing, disabled, altered or older than this"
    " daemon's; only catalog polls detect changes. `remedy` fixes it; nothing else must be done.",
    "epoch.committed": "An epoch is durable: raw tables and `_epochs`. One line for each epoch.",
    "epoch.files_left": "An epoch was abandoned, and its files could not be removed. Nothing reads"
    " them; maintenance removes them later.",
    "failpoint.reached": "A failpoint acted. Only with `INGESTD_FAILPOINTS` set, in tests.",
    "failpoints.on": "Fault injection is enabled (failpoints). Do not use in production.",
    "http.bad_request": "Requests arrived that are not HTTP: `count` of them since the last such line,"
    " which is logged at most once a minute.",
    "http.commands_off": "There is no folder for the token of commands: `ingestd snapshot`, `pause` and"
    " `resume` are refused; reading is not. `remedy` says what to set.",
    "http.listening": "Where metrics, health and status are served.",
    "http.open": "Other machines can reach the HTTP server, and something is not protected. `reason`"
    " says what.",
    "lake.file_set_aside": "A power failure left a file incomplete; its content is delivered again.",
    "lake.foreign_commit": "Another program wrote to a raw table. Stop it, then re-snapshot the"
    " table.",
    "claim.not_ended": "This role can't end a session that the previous holder of the claim left."
    " That session may keep the slot until the server drops its connection.",
    "claim.session_ended": "A session that the previous holder of the claim left at the slot was ended;"
    " `pid` is its process. That daemon was frozen, disconnected or killed.",
    "lake.taken_over": "Another slot, or another polled database, wrote this lake last. Its daemon"
    " stops, if it runs; a slot retains WAL until it is dropped.",
    "maintenance.done": "Small files were compacted; unreferenced files were removed.",
    "maintenance.failed": "Maintenance of the lake failed; it is retried. Logged once until one succeeds.",
    "object.failed": "An object's cleanup failed; its error. A fault of the program.",
    "page.failed": "The status page no longer receives updates; replication continues.",
    "reference.committed": "A reference table has a new version.",
    "reference.retried": "A reference table could not be read now; it is retried.",
    "reference.stopped": "A reference table can't continue. Do what `remedy` says.",
    "service_manager.unreachable": "systemd's socket does not accept notifications.",
    "snapshot.cancelled": "The snapshots of these tables were cancelled on request.",
    "snapshot.failed": "A snapshot can't be read; its table continues as before.",
    "snapshot.request_lost": "A snapshot was requested, and the source restarted before it was"
    " read. Request it again.",
    "snapshot.requested": "A re-snapshot of these tables was requested; `partial`: of some of"
    " their rows.",
    "snapshot.retried": "Tables could not be read now; the read is retried. The stream continues.",
    "snapshot.waiting": "Reading, or the stream of a new slot, can't begin before older transactions end (`remedy` finds them), nor on a standby before its primary has logged which run.",
    "slot.not_moved": "The server has no free connection to advance the slot while a"
    " backlog is drained; the slot retains more WAL until then. Logged once, until it advances.",
    "source.discovered": "The contents of lake and source, at each start of a source.",
    "source.drained": "The lake has all that the source had committed (`ingestd run --once`).",
    "source.encoding": "The database has values in an encoding that only the server converts.",
    "source.failed": "A source can't continue: `state` is backing_off (retried automatically) or stopped"
    " (operator action required). Logged once for each change of state.",
    "source.first_start": "The lake has nothing of the source: it is started there, and all its tables are"
    " read. For a polled source, nothing may show whether another lake had it.",
    "source.held": "WAL retained for a paused source, in bytes: when it is paused, then every"
    " hour.",
    "source.lag_unknown": "The lag can't be measured. Logged once, until it can be measured again.",
    "source.lake_lost": "The lake is empty, another one or an older copy, and the config or command line"
    " (`lake_lost`, `--accept-empty-lake`) permits re-reading every table.",
    "source.paused": "The source was paused on request, at the time `since`; it delivers nothing until it is"
    " resumed.",
    "source.removed": "After a reload the source is missing from the config. Its slot stays, and retains WAL:"
    " drop it if the source will not come back.",
    "source.resumed": "A paused source continues where it was.",
    "source.slot_lost": "The stream can't continue from the lake's position; every table is re-read.",
    "source.state": "The source changed state.",
    "source.synchronous": "The server may choose the stream as a synchronous standby: commits of the"
    " source would wait until their changes are durable in the lake.",
    "source.unknown_error": "An unexpected error, and where it was raised. A fault of the program: please"
    " report it.",
    "storage.answered": "The call of `storage.waits` returned.",
    "storage.waits": "A call to the lake's storage has not returned for 15 s: `path`. The source is not"
    " ready; it continues when the call returns.",
    "table.raw_values": "A column has values that its lake type can't hold; they are in `_cdc_raw`."
    " Logged once for each column.",
    "table.state": "The table changed state; `reason`: why it is re-read.",
    "table.stopped": "One table can't continue; the others do. Do what `remedy` says.",
    "tables.unmatched": "A pattern in `tables`, or a table's section, matches no table"
    " that exists at present.",
    "task.failed": "An asyncio task failed with an unhandled exception. A fault of the program.",
    "thread.failed": "A thread failed with an unhandled exception. A fault of the program.",
    "tls.read_by_libpq": "Functions of libpq or its OpenSSL were not found, so libpq reads over TLS:"
    " it buffers each complete row, however large. Logged once, at the level `debug`.",
    "tls.weak": "The DSN does not require a verified server: it could be anyone.",
    "watch.refused": "The liveness probe could not open a second connection: a hung connection will go"
    " undetected, an unreachable server will not. Logged once.",
}
OF_JOBS: Mapping[str, str] = {
    "JOB.moved": "All tables were advanced to the same epoch. `JOB` is `mirror`, `history` or `feed`.",
    "accelerator.off": "Delta's classes are not as the driver expects them (`reason`): Spark does all work"
    " of this run.",
    "catalog.failed": "The catalog of `--catalog` can't be used; rows are moved all the same, and it is asked"
    " again after a minute.",
    "catalog.reached": "The catalog answers again; tables without a name get theirs.",
    "databricks.not_tried": "The job runs on Databricks, where it was never tried: compare its tables.",
    "catalog.removed": "The name of a table that the source no longer has was removed; its files stay.",
    "raw.files_gone": "Files that a raw table's log names are missing; the job continues without them.",
    "mirror.rebuilding": "A mirror is re-created, for the given `reason`.",
    "variant.kept_as_text": "With `--variant`, `values` of the rows of a step are in `_cdc_raw`, because VARIANT can't hold them exactly.",
    "table.no_key": "The table has no key, so the job keeps nothing of it. Logged once.",
    "table.resumed": "A table that had stopped continues.",
    "table.stopped": "One table can't continue; the others do. Do what `remedy` says.",
}
"""The same for the Spark jobs."""
_LEVELS = ("debug", "info", "warning", "error", "critical")
_LOGS = re.compile(rf"\.({'|'.join(_LEVELS)})\b|\bNotice\(")
"""In a module that logs."""
_NAME = re.compile(r"[a-z_]+\.[a-z_]+\Z")
_INTRO = """# Log events

Logs go to stderr, one line each: JSON, or readable text if stderr is a terminal (`[log]`). `event`
is a constant name; the rest are its facts. `timestamp` (UTC) and `level` are on every line, `source`
if one is concerned. There are no values of rows and no secrets, and one line for each change of
state, never for each attempt. Libraries' warnings are lines whose `event` is their text.

| level | when |
|---|---|
| info | normal operation |
| warning | something is wrong, and resolves automatically or can wait |
| error | operator action required, or the program has a fault |

"""


@dataclass(slots=True)
class Event:
    """An event in the code: the levels and facts of all calls."""

    levels: set[str] = field(default_factory=set)
    facts: dict[str, None] = field(default_factory=dict)


def page(daemon: Path, jobs: Path) -> str:
    """Return the page of both packages.

    Raise ValueError if an event lacks a meaning, or a meaning its event.
    """
    return f"{MADE_BY}{_INTRO}{_table(daemon, MEANINGS)}\n## Spark jobs\n\n{_table(jobs, OF_JOBS)}"


def _table(package: Path, meanings: Mapping[str, str]) -> str:
    found = events(package)
    problems = [
        f"{n}: no meaning in docs_site/events.py" for n in sorted(set(found) - set(meanings))
    ]
    problems += [f"{n}: no such event in the code" for n in sorted(set(meanings) - set(found))]
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
    """Return every event that the package's code logs, by name."""
    found: dict[str, Event] = {}
    for path in sorted(package.rglob("*.py")):
        if {"testing", "demo"} & {*path.parts} or not _LOGS.search(path.read_text("utf-8")):
            continue
        tree = _parsed(path)
        bound = [*_bound(tree), *chain(*map(_bound, _modules_of_bases(tree, package)))]
        for name, levels, facts in _calls(tree, bound):
            event = found.setdefault(name, Event())
            event.levels |= levels
            event.facts |= dict.fromkeys(facts)
    return found


def _bound(tree: ast.Module) -> list[str]:
    """Return the facts that a module binds to its own log."""
    return [k.arg for c in ast.walk(tree) if _attribute(c) == "bind" for k in _keywords(c) if k.arg]


def _modules_of_bases(tree: ast.Module, package: Path) -> Iterator[ast.Module]:
    """Yield the modules of ours from which a module's classes inherit, and thus their log."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {base.id for c in classes for base in c.bases if isinstance(base, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and bases & {alias.name for alias in node.names}:
            path = package.parent / f"{(node.module or '').replace('.', '/')}.py"
            if path.exists():
                yield _parsed(path)


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


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
        return f"JOB{end.value!s}" if _NAME.match(name) else None  # `mirror.moved`, ...
    return None


def _levels(call: ast.Call, scope: ast.AST) -> set[str]:
    if _attribute(call) in _LEVELS:
        return {_attribute(call)}
    if not isinstance(call.func, ast.Name):
        return set()
    if call.func.id == "Notice":  # logged by `SourceTelemetry.noticed`
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
    """Return whether the log was bound to its source: `self._log`, or derived from it."""
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

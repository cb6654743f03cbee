"""Maintenance of a source's lake in a separate process (ports.LakeMaintenance).

Joining files takes CPU and memory that an epoch would otherwise wait for. A separate process runs
at the lowest priority, with one thread each for CPU and reading, and its memory is freed when it
ends. It ends when its standard input does, so it does not outlive the daemon. It may be killed at
any step (see `ingestd.lake.maintenance.compaction`).

It receives the order as one line of JSON, and writes one line before and one after each table.

A table may take too long, or more memory than there is: a small file can have 200 million rows. So
the fault is the table's at which the process ends, and another one continues with the others. If
that happens again at once, it may be due to the storage or the machine, so the rest waits for the
next run. There such tables come last, those that ended a process longest ago first.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import IO, Any

from ingestd import failpoints
from ingestd.lake.delta.append_log import AppendLog
from ingestd.lake.lake_id import read_lake_id
from ingestd.lake.layout import Layout
from ingestd.lake.maintenance.compaction import (
    MaintenancePolicy,
    MaintenanceResult,
    TableMaintenance,
)
from ingestd.lake.registry_table import RegistryTable
from ingestd.lake.store.errors import reference_fault, storage_faults, table_fault, unreadable
from ingestd.lake.store.store import Store, ensure_own_links, linked, open_store
from ingestd.lake.table_folders import raw_tables, reference_tables
from ingestd.model.errors import FolderError, IngestdError, OperatorError, TransientError
from ingestd.model.schema import TableId
from ingestd.ports import MaintainedTable
from ingestd.process.python_command import module_environment, python_command

SILENT_LIMIT_S = 3600.0
"""Limit for one table, after which its process is killed."""
MOST_ENDED = 2
"""Processes that end at a table, without one that is done in between, before a run ends."""
_BEGINS = "begins"
_Entry = tuple[str, str, bool]
"""A table's name and folder, and whether its files are joined."""
MOST_OUTPUT_CHARS = 500
_LINE_BYTES = 1 << 20


class _EndedError(Exception):
    """The process ended before its work was done. `how`: continues "maintenance of a table"."""

    def __init__(self, how: str, *, is_slow: bool = False) -> None:
        super().__init__(how)
        self.how = how
        self.is_slow = is_slow


class MaintenanceProcess:
    """See above. `uri`: the lake's; `references`: tables of `_ref` that `_tables` may not list."""

    def __init__(
        self,
        uri: str,
        source: str,
        policy: MaintenancePolicy,
        *,
        storage_options: Mapping[str, str] | None = None,
        references: Collection[str] = (),
        silent_limit_s: float = SILENT_LIMIT_S,
    ) -> None:
        self._uri = uri
        self._silent_limit_s = silent_limit_s
        self._ended_at: list[str] = []
        self._references = sorted(references)
        self._source = source
        self._policy = policy
        self._storage_options = storage_options
        self._began_s = time.time()  # files written since may be of an epoch that fills

    async def run(
        self, *, joins: bool, cleans: bool, only: Collection[str] | None = None
    ) -> AsyncGenerator[MaintainedTable, None]:
        """Run the process and yield its results. Closing the generator kills it."""
        order: dict[str, Any] = {
            "uri": self._uri,
            "storage_options": dict(self._storage_options or {}),
            "source": self._source,
            "target_bytes": self._policy.target_bytes,
            "retention_s": self._policy.retention_s,
            "began_s": self._began_s,
            "joins": joins,
            "cleans": cleans,
            "references": self._references,
            "only": None if only is None else sorted(only),
        }
        done: set[str] = set()
        ended = 0
        while ended < MOST_ENDED:
            at: Mapping[str, Any] = {}
            order |= {"done": sorted(done), "last": self._ended_at}
            try:
                with tempfile.TemporaryFile() as complaints:
                    async with aclosing(self._lines(order, complaints)) as lines:
                        async for text in lines:
                            line = json.loads(text)
                            at = line if _BEGINS in line else {}
                            if not at:
                                ended = 0
                                self._note_done(line["table"], done)
                                yield _maintained_table(line)
            except _EndedError as error:
                fault = self._fault(error, at.get(_BEGINS, "the lake"), at.get("remedy"))
                if not at:
                    raise fault from error
                ended += 1
                self._note_done(at[_BEGINS], done)
                self._ended_at.append(at[_BEGINS])
                yield MaintainedTable(table=at[_BEGINS], error=fault)
            else:
                return

    def _note_done(self, table: str, done: set[str]) -> None:
        done.add(table)
        if table in self._ended_at:
            self._ended_at.remove(table)

    def _fault(self, error: _EndedError, table: str, remedy: str | None) -> IngestdError:
        """Return the fault of the table at which a process ended; `remedy`: if it was slow."""
        what = f"source {self._source}: maintenance of {table} {error.how}"
        if error.is_slow:
            return OperatorError(what, remedy=remedy)
        return TransientError(what, reason="maintenance")

    async def _lines(
        self, order: Mapping[str, Any], complaints: IO[bytes]
    ) -> AsyncGenerator[bytes, None]:
        process = await asyncio.create_subprocess_exec(
            *python_command("-m", "ingestd.lake.maintenance.process"),
            env=module_environment(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=complaints,
            limit=_LINE_BYTES,
            start_new_session=True,  # a terminal's Ctrl-C must reach only the daemon
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{json.dumps(order)}\n".encode())
            while line := await self._line(process.stdout):
                yield line
            code = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if code != 0:
            complaints.seek(0)
            last_line = complaints.read().decode(errors="replace").strip().rpartition("\n")[2]
            last_line = last_line[:MOST_OUTPUT_CHARS] or "no error output (killed for its memory?)"
            raise _EndedError(f"ended with code {code}: {last_line}")

    async def _line(self, lines: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(self._silent_limit_s):
                return await lines.readline()
        except TimeoutError as error:
            took = f"took over {self._silent_limit_s:g} s, and was ended"
            raise _EndedError(took, is_slow=True) from error


def _maintained_table(line: Mapping[str, Any]) -> MaintainedTable:
    error: IngestdError | None = None
    if "error" in line:
        error = (
            TransientError(line["error"], reason="storage", remedy=line["remedy"])
            if line["passes"]
            else OperatorError(line["error"], remedy=line["remedy"])
        )
    return MaintainedTable(
        table=line["table"],
        small_files=line.get("small_files"),
        joined_files=line.get("joined_files", 0),
        written_bytes=line.get("written_bytes", 0),
        removed_files=line.get("removed_files", 0),
        error=error,
    )


# --- the process itself ----------------------------------------------------------------------


def main() -> None:
    """Read the order from standard input, then maintain table after table."""
    failpoints.arm(os.environ.get(failpoints.VARIABLE, ""), _send_failpoint, only="maintenance.")
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _lower_priority()
    code = 0
    try:
        for line in maintain(order, _write_line):
            _write_line(line)
    except IngestdError as error:  # of the lake, not of one table
        code = 1
        sys.stderr.write(f"{' '.join(error.what.split())}\n")
        sys.stderr.flush()
    os._exit(code)  # a thread may be blocked in the storage


def _write_line(line: Mapping[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(line)}\n")
    sys.stdout.flush()


def _send_failpoint(point: str, action: str, time: int) -> None:
    sys.stderr.write(f"failpoint.reached {point} {action} {time}\n")
    sys.stderr.flush()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def _lower_priority() -> None:
    """Lower the priority of this process below all others."""
    import pyarrow as pa  # noqa: PLC0415 - after the order was read: imports take time

    os.nice(19)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


def _ignore(_line: Mapping[str, Any]) -> None:
    """Ignore which table begins."""


def maintain(
    order: Mapping[str, Any], begin: Callable[[Mapping[str, Any]], None] = _ignore
) -> Iterator[dict[str, Any]]:
    """Carry out an order; yield a line for each table: the result or the error.

    `begin`: called with a line before each table: its name, and the remedy if it takes too long.
    """
    store = open_store(order["uri"], order["storage_options"] or None)
    read_lake_id(store)
    policy = MaintenancePolicy(order["target_bytes"], order["retention_s"])
    layout = Layout(order["source"])
    every = tables_of(store, layout, order["references"])
    for name, folder, joins in _in_order(every, order.get("last", ())):
        if order["only"] is not None and name not in order["only"]:
            continue
        if name in order.get("done", ()):
            continue
        uri = store.uri(folder)
        begin({_BEGINS: name, "remedy": _remedy(FolderError(""), layout, folder, uri)})
        table = TableMaintenance(store, folder, policy, now_s=time.time(), began_s=order["began_s"])
        try:
            with storage_faults(uri):
                ensure_own_links(store, folder)
                link = linked(store, folder)
            if link is not None:
                yield {"table": name, **_refusal(store.uri(link))}
                continue
            with unreadable(uri):
                done = table.run(joins=joins and order["joins"], cleans=order["cleans"])
        except IngestdError as error:
            passes = isinstance(error, TransientError)
            remedy = _remedy(error, layout, folder, uri)
            yield {"table": name, "error": error.what, "remedy": remedy, "passes": passes}
        else:
            yield {"table": name, **_line(done, knows_small=joins)}


def _in_order(tables: Iterator[_Entry], last: Sequence[str]) -> Iterator[_Entry]:
    """Yield those named in `last` after all others, in its order."""
    later: dict[str, _Entry] = {}
    for table in tables:
        if table[0] in last:
            later[table[0]] = table
        else:
            yield table
    yield from (later[name] for name in last if name in later)


def _refusal(link: str) -> dict[str, Any]:
    at = shlex.quote(link)
    return {
        "error": f"lake {link} is a symbolic link: files of the tables behind it are neither joined"
        " nor removed, as the link may lead to files that ingestd does not own",
        "remedy": "stop ingestd and replace the link by a mount of its target:"
        f' at="$(realpath {at})" && rm {at} && mkdir {at} && mount --bind "$at" {at}',
        "passes": False,
    }


def _remedy(error: IngestdError, layout: Layout, folder: str, uri: str) -> str | None:
    """Return the remedy for a fault of a table's folder, the same as its capture reports (I8)."""
    parts = folder.split("/")
    if not isinstance(error, FolderError) or len(parts) < len(("source", "schema", "table")):
        return error.remedy  # a fault of the lake, or of `_epochs` or `_tables`
    found = layout.table_of(*parts[-2:])
    if found is None:
        return error.remedy
    if folder == layout.reference(found):
        return reference_fault(error, found, uri).remedy
    return table_fault(error, layout.source, found, uri).remedy


def _line(done: MaintenanceResult, *, knows_small: bool) -> dict[str, Any]:
    return {
        "small_files": done.small_files if knows_small else None,
        "joined_files": done.joined_files,
        "written_bytes": done.written_bytes,
        "removed_files": done.cleaned.log_files + done.cleaned.data_files,
    }


def tables_of(store: Store, layout: Layout, references: Collection[str]) -> Iterator[_Entry]:
    """Yield each table's name, its folder, and whether its files are joined.

    Only tables that `_tables` lists, and in `_ref` also those in `references`: others may not be
    ours. Those in `_ref` are not joined here: their writer does that as they change.
    """
    yield "_epochs", layout.epochs, True
    yield "_tables", layout.tables, True
    registry = RegistryTable(AppendLog(store, layout.tables, layout.app_id()), lambda _: None)
    with unreadable(store.uri(layout.tables)):
        registry.load()
    known = {entry.table for entry in registry.tables().values()}
    referenced = {TableId.parse(name) for name in references}
    with storage_faults(store.uri(layout.root)):
        raw = raw_tables(store, layout, known)
        copies = reference_tables(store, layout, referenced)
    yield from ((str(t), layout.raw(t), True) for t in raw if t in known)
    yield from (
        (f"_ref/{t}", layout.reference(t), False) for t in copies if t in known | referenced
    )


if __name__ == "__main__":
    main()

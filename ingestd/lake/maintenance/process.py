"""Maintenance of a source's lake in a separate process (ports.LakeMaintenance).

Joining files takes CPU and memory that an epoch would otherwise wait for. A separate process runs
at the lowest priority, with one thread each for CPU and reading, and its memory is freed when it
ends. It ends when its standard input does, so it does not outlive the daemon. It may be killed at
any step (see `ingestd.lake.maintenance.compaction`).

It receives the order as one line of JSON, and writes one line for each table.
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
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
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
"""Limit for one table, after which the storage counts as hung."""
MOST_OUTPUT_CHARS = 500
_LINE_BYTES = 1 << 20


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
    ) -> None:
        self._uri = uri
        self._references = sorted(references)
        self._source = source
        self._policy = policy
        self._storage_options = storage_options
        self._began_s = time.time()  # files written since may be of an epoch that fills

    async def run(
        self, *, joins: bool, cleans: bool, only: Collection[str] | None = None
    ) -> AsyncGenerator[MaintainedTable, None]:
        """Run the process and yield its results. Closing the generator kills it."""
        order = {
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
        with tempfile.TemporaryFile() as complaints:
            async with aclosing(self._lines(order, complaints)) as lines:
                async for line in lines:
                    yield _maintained_table(json.loads(line))

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
            raise TransientError(
                f"source {self._source}: maintenance of the lake ended with code {code}: "
                f"{last_line[:MOST_OUTPUT_CHARS] or 'no error output (killed for its memory?)'}",
                reason="maintenance",
            )

    async def _line(self, lines: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(SILENT_LIMIT_S):
                return await lines.readline()
        except TimeoutError as error:
            raise TransientError(
                f"source {self._source}: maintenance of a table took over {SILENT_LIMIT_S:g} s",
                reason="maintenance",
            ) from error


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
        for line in maintain(order):
            sys.stdout.write(f"{json.dumps(line)}\n")
            sys.stdout.flush()
    except IngestdError as error:  # of the lake, not of one table
        code = 1
        sys.stderr.write(f"{' '.join(error.what.split())}\n")
        sys.stderr.flush()
    os._exit(code)  # a thread may be blocked in the storage


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


def maintain(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Carry out an order; yield a line for each table: the result or the error."""
    store = open_store(order["uri"], order["storage_options"] or None)
    read_lake_id(store)
    policy = MaintenancePolicy(order["target_bytes"], order["retention_s"])
    layout = Layout(order["source"])
    for name, folder, joins in tables_of(store, layout, order["references"]):
        if order["only"] is not None and name not in order["only"]:
            continue
        uri = store.uri(folder)
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


def tables_of(
    store: Store, layout: Layout, references: Collection[str]
) -> Iterator[tuple[str, str, bool]]:
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

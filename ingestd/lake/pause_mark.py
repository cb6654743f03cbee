"""The mark of a paused source: a file next to its tables (ports.PauseMark)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime

from ingestd.lake.lake_id import read_lake_id
from ingestd.lake.layout import Layout
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.pending_calls import StorageCalls
from ingestd.lake.store.plain_files import Durability
from ingestd.lake.store.store import Store, open_store
from ingestd.model.errors import LakeLostError
from ingestd.model.recorded import RecordError, read_json
from ingestd.process.clock import utc_now

_MOST_BYTES = 1 << 16
NAME = "_paused"
"""No schema's folder has this name, as a leading `_` is escaped."""


class LakePauseMark:
    """The file `_paused` in a source's folder; as JSON it records since when the pause holds.

    Only its existence counts: a file made by hand pauses too, whatever its content. `needs_lake`:
    refuse to pause where there is no lake, which may just not be mounted. `calls`: records the
    calls to the storage.
    """

    def __init__(
        self,
        uri: str,
        source: str,
        *,
        storage_options: Mapping[str, str] | None = None,
        durability: Durability | None = None,
        needs_lake: bool = False,
        calls: StorageCalls | None = None,
    ) -> None:
        self._calls = calls
        self._needs_lake = needs_lake
        self._uri = uri
        self._folder = Layout(source).root
        self._path = f"{self._folder}/{NAME}"
        self._storage_options = storage_options
        self._durability = durability
        self._store: Store | None = None

    async def since(self) -> datetime | None:
        """Read the file, if it exists."""
        return await asyncio.to_thread(self.read_since)

    async def put(self, now: datetime) -> datetime:
        """Write the file, unless it exists."""
        return await asyncio.to_thread(self._put, now)

    async def clear(self) -> bool:
        """Remove the file."""
        return await asyncio.to_thread(self._clear)

    def _opened(self) -> Store:
        if self._store is None:
            self._store = open_store(
                self._uri, self._storage_options, self._durability, self._calls
            )
        return self._store

    def read_since(self) -> datetime | None:
        """Return since when the source is paused; None if it is not. Blocks."""
        with storage_faults(self._uri):
            store = self._opened()
            if store.size(self._path) is None:
                return None
            try:
                return _time_in(store.read(self._path, _MOST_BYTES)) or self._written(store)
            except FileNotFoundError:
                return None  # it was removed meanwhile

    def _written(self, store: Store) -> datetime:
        at = store.written(self._folder).get(NAME)
        return utc_now() if at is None else datetime.fromtimestamp(at, UTC)

    def _put(self, now: datetime) -> datetime:
        since = self.read_since()
        if since is not None:
            return since
        content = json.dumps({"since": now.astimezone(UTC).isoformat()}).encode() + b"\n"
        with storage_faults(self._uri):
            store = self._opened()
            if self._needs_lake and read_lake_id(store) is None and not store.folders(self._folder):
                raise LakeLostError(
                    f"lake {self._uri} has no data of this source: it was never started there, or "
                    "the lake is not mounted, or was removed",
                    remedy="put the lake back; or start the source first: ingestd run",
                )
            if store.supports_conditional_put:
                store.make_folder(self._folder)
                if not store.put_if_absent(self._path, content):
                    return self.read_since() or now
                store.sync(self._folder, [])
            else:
                with store.create(self._path) as file:
                    file.write(content)
        return now

    def _clear(self) -> bool:
        with storage_faults(self._uri):
            store = self._opened()
            was_there = store.size(self._path) is not None
            store.remove(self._path)
            if was_there:
                store.sync(self._folder, [])
            return was_there


def _time_in(content: bytes) -> datetime | None:
    try:
        return read_json(content, _MOST_BYTES).field("since").instant()
    except RecordError:
        return None

"""The id file in a lake's root, `_ingestd.json`: the lake's id and the format of its content.

It is written before anything else. So a folder without one is not yet a lake, or is not mounted, or
was written by a version that made no id file. It is never overwritten: if it can't be read, an
operator must decide.
"""

from __future__ import annotations

import json
import uuid

from ingestd.failpoints import reach
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.local_store import ID_FILE as NAME
from ingestd.lake.store.paths import OddFileError
from ingestd.lake.store.store import Store
from ingestd.model.errors import LakeLostError, OperatorError
from ingestd.model.recorded import RecordError, read_json

FORMAT = 1
"""The newest format that this version reads and writes."""
_MOST_BYTES = 1 << 16
_OF_FILE_SYSTEMS = {"lost+found"}
_NAMED = 3


def read_lake_id(store: Store) -> str | None:
    """Return the lake's id; None if there is no id file. Blocks.

    Raise OperatorError for a newer format and for a damaged file, and as `storage_faults` does.
    """
    with storage_faults(store.uri(NAME)):
        try:
            if store.size(NAME) is None:
                return None
            content = store.read(NAME, _MOST_BYTES)
        except FileNotFoundError:
            return None  # it was removed meanwhile
        except OddFileError as error:
            raise _damaged(store, f"it {error.why}") from error
        except OSError as error:
            if NAME in store.folders(""):
                raise _damaged(store, "it is a folder") from error
            raise
    return _lake_in(store, content)


def write_lake_id(store: Store, lake_id: str | None = None) -> str:
    """Write the id file, durably, if there is none; return the id of the lake.

    `lake_id`: the id to write, a new one if None. Creates the lake's folder. Blocks. Raise as
    `read_lake_id` does.
    """
    known = read_lake_id(store)
    if known is not None:
        return known
    chosen = lake_id or str(uuid.uuid4())
    content = json.dumps({"format": FORMAT, "lake": chosen}).encode() + b"\n"
    with storage_faults(store.uri(NAME)):
        reach("sink.marker.before")
        store.make_folder("")
        if store.supports_conditional_put:
            store.put_if_absent(NAME, content)
        else:  # no conditional put: the last writer wins, and is read back below
            with store.create(NAME) as file:
                file.write(content)
        store.sync("", [])
        reach("sink.marker.after")
    written = read_lake_id(store)
    if written is None:
        raise _damaged(store, "it cannot be read back")
    return written


def note_source(store: Store, segment: str) -> None:
    """Record durably, next to the id file, that the lake has a source's folder. Blocks."""
    name = _note(segment)
    with storage_faults(store.uri(name)):
        if store.size(name) is not None:
            return
        content = json.dumps({"folder": segment}).encode() + b"\n"
        if store.supports_conditional_put:
            store.put_if_absent(name, content)
        else:
            with store.create(name) as file:
                file.write(content)
        store.sync("", [])


def removed(store: Store, segment: str, lake_id: str | None) -> str | None:
    """Return the evidence that a source's folder was removed from a lake; None if there is none.

    `lake_id`: the lake's id. Blocks. A mount point often contains a file that says so. What a new
    file system contains, and hidden files, are no evidence.
    """
    with storage_faults(store.uri("")):
        if lake_id is not None:
            if store.size(_note(segment)) is None:
                return None
            return (
                f"its file {_note(segment)} says that the source was read into it, but its folder "
                f"{segment} has none of its tables: they were removed"
            )
        if not store.syncs:
            return None  # a prefix of a bucket is always mounted
        found = [n for n in (*store.folders(""), *store.files("")) if n not in _OF_FILE_SYSTEMS]
    found = [name for name in found if not name.startswith(".")]
    if not found:
        return None
    names = ", ".join(sorted(found)[:_NAMED]) + (", ..." if len(found) > _NAMED else "")
    return (
        f"its folder has no {NAME}, but has {names}: the lake is not mounted, or that file was "
        "removed, or this is a first start"
    )


def _note(segment: str) -> str:
    return f"_ingestd.{segment}.json"


def require_lake_id(store: Store, lake_id: str | None = None) -> None:
    """Raise LakeLostError if the id file is missing or has another id than `lake_id`. Blocks.

    Raise also as `read_lake_id` does.
    """
    found = read_lake_id(store)
    if found is None:
        raise LakeLostError(
            f"lake {store.uri('')}: {NAME} is missing: the lake is not mounted, or was removed",
            remedy="mount the lake, or put it back",
        )
    if lake_id is not None and found != lake_id:
        raise LakeLostError(
            f"lake {store.uri('')}: it is another lake: {NAME} has the id {found}, not {lake_id}",
            remedy="put the lake back, or correct lake.uri",
        )


def _lake_in(store: Store, content: bytes) -> str:
    try:
        found = read_json(content, _MOST_BYTES)
        number = found.field("format").integer(1, 10**30)
    except RecordError as error:
        raise _damaged(store, str(error)) from error
    if number > FORMAT:
        raise OperatorError(
            f"lake {store.uri('')}: {NAME} has format {number}, and this version of ingestd reads "
            f"formats up to {FORMAT}: a newer version has written the lake",
            remedy="run that version, or a newer one; nothing was changed",
        )
    try:
        return str(uuid.UUID(found.field("lake").text()))
    except ValueError as error:
        raise _damaged(store, '"lake" is not a UUID') from error


def _damaged(store: Store, why: str) -> OperatorError:
    return OperatorError(
        f"lake {store.uri('')}: {NAME} is damaged: {why}",
        remedy=f"put {NAME} back from a copy of the lake. If there is none, and the lake's tables "
        "exist: remove it, and `ingestd run` writes a new one if the lake matches its sources",
    )

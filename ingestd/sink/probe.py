"""`ingestd check` for the lake: whether it can be written."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from ingestd.checks import CheckLine
from ingestd.errors import IngestdError
from ingestd.sink.faults import storage_faults
from ingestd.sink.store import open_store


def probe(uri: str, storage_options: Mapping[str, str] | None = None) -> CheckLine:
    """Write, sync, read and remove a small file at the lake's root. Blocks."""
    subject = f"lake {uri}"
    name = f"_ingestd_probe_{uuid.uuid4().hex}"
    try:
        store = open_store(uri, storage_options)
        with storage_faults(store.uri("")):
            store.make_folder("")
            try:
                with store.create(name) as file:
                    file.write(b"probe")
                store.sync("", [name])
                size = store.size(name)
            finally:
                store.remove(name)
    except IngestdError as error:
        return CheckLine("", subject, "fail", error.what, error.remedy)
    if size != len(b"probe"):
        return CheckLine("", subject, "fail", "a file that was written can't be read back")
    return CheckLine("", subject, "ok", "writable")

"""`ingestd check` for the lake: whether commits can be made there, and are refused if they must be.

What it leaves behind is what was there before: not even the lake's own folder.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Barrier

from deltalake import DeltaTable, Field, Schema
from deltalake.exceptions import DeltaError
from deltalake.schema import PrimitiveType

from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.store import LocalStore, Store, open_store
from ingestd.model.check import CheckLine
from ingestd.model.errors import IngestdError, OperatorError

CONTESTS = 6
"""How often two commits are raced in an object store until they have met."""
_CONTENT = b"probe"
_SCHEMA = Schema([Field("probe", PrimitiveType("string"))])
_REMEDY = "see whether `lake.uri` and `[lake.storage_options]` are right, and the store answers"
_THERE_ALREADY = "already exists"
_NOT_KNOWN = "<Code>NotImplemented</Code>"
"""What an S3 store says to a header that it does not know."""
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


class _OverwritesError(OperatorError):
    def __init__(self) -> None:
        super().__init__(
            "the store does not refuse a commit where there is one already (a put with"
            " If-None-Match): two writers could overwrite each other's",
            remedy="use one that does, such as S3, GCS, Azure, MinIO, R2, or a newer version",
        )


def probe(uri: str, storage_options: Mapping[str, str] | None = None) -> CheckLine:
    """Write, read, list and remove a small file there, and try to commit over a commit. Blocks."""
    subject = f"lake {uri}"
    try:
        store = open_store(uri, storage_options)
        with _folder_of(store):
            _try_file(store)
            is_sure = _try_second_commit(store)
    except IngestdError as error:
        return CheckLine("", subject, "fail", error.what, error.remedy or _REMEDY)
    if not is_sure:
        detail = "writable; whether it refuses a second commit could not be seen"
        return CheckLine("", subject, "warn", detail, "run it again; see docs/object-stores.md")
    detail = f"writable; {store.remark}" if store.remark else "writable"
    return CheckLine("", subject, "ok", detail)


@contextmanager
def _folder_of(store: Store) -> Iterator[None]:
    """Make the lake's folder, and take away again what of it was not there."""
    root = Path(store.uri("")) if isinstance(store, LocalStore) else None
    missing = [] if root is None else [p for p in (root, *root.parents) if not p.exists()]
    try:
        with storage_faults(store.uri("")):
            store.make_folder("")
        yield
    finally:
        for folder in missing:
            with suppress(OSError):  # a daemon that begins meanwhile keeps it
                folder.rmdir()


def _try_file(store: Store) -> None:
    name = _new_name()
    try:
        with _step(store, "can't write"):
            with store.create(name) as file:
                file.write(_CONTENT)
            store.sync("", [name])
        with _step(store, "can't read"), store.open(name) as written:
            content = bytes(written.read())
        if content != _CONTENT:
            raise OperatorError(f"{store.uri(name)}: what was written is not what is read back")
        with _step(store, "can't list"):
            names = store.files("")
        if name not in names:
            raise OperatorError(f"{store.uri(name)}: what was written is not listed")
    except IngestdError:
        with suppress(Exception):  # the first fault is the one to be told
            store.remove(name)
        raise
    with _step(store, "can't delete"):
        store.remove(name)


def _try_second_commit(store: Store) -> bool:
    """Return whether it was seen to be refused. Raises OperatorError if it is not."""
    if store.supports_conditional_put:
        _try_put_new(store)
        return True
    return any(_is_refused(store) for _ in range(CONTESTS))


def _try_put_new(store: Store) -> None:
    name = _new_name()
    try:
        with _step(store, "can't commit"):
            is_there = store.put_if_absent(name, _CONTENT) or store.size(name) is not None
            is_second = store.put_if_absent(name, _CONTENT)
    except IngestdError as error:
        cause = error.__cause__
        if _NOT_KNOWN in str(cause):
            raise _OverwritesError from error
        if not isinstance(cause, OSError) or cause.errno not in _NO_LINKS:
            raise
        raise OperatorError(
            f"{store.uri('')}: this file system has no hard links, by which a commit is refused"
            " if there is one already",
            remedy="choose a folder on one that has, such as ext4, XFS or NFS",
        ) from error
    finally:
        with suppress(OSError):
            store.remove(name)
    if is_second:
        raise _OverwritesError
    if not is_there:
        raise OperatorError(
            "the store refuses a commit (a put with If-None-Match) where there is none",
            remedy="see what between here and the store changes or answers such requests",
        )


def _is_refused(store: Store) -> bool:
    """Have two make the same table at once, as deltalake commits; False if they did not meet.

    Each looks first whether there is one. Where both found none, both put version 0: the second is
    refused, and goes on to version 1, or has overwritten the first.
    """
    name = _new_name()
    together = Barrier(2)

    def create(_: int) -> bool:
        together.wait()
        try:
            DeltaTable.create(store.uri(name), _SCHEMA, storage_options=store.storage_options)
        except (DeltaError, OSError) as error:
            if _THERE_ALREADY in str(error):
                return False
            if _NOT_KNOWN in str(error):
                raise _OverwritesError from error
            raise
        return True

    try:
        with _step(store, "can't commit"):
            with ThreadPoolExecutor(2) as pool:
                have_met = all(list(pool.map(create, range(2))))
            table = DeltaTable(store.uri(name), storage_options=store.storage_options)
            if have_met and table.version() == 0:
                raise _OverwritesError
    finally:
        with suppress(Exception):  # told above, by the file
            store.remove_folder(name)
    return have_met


def _new_name() -> str:
    return f"_ingestd_probe_{uuid.uuid4().hex}"


@contextmanager
def _step(store: Store, what: str) -> Iterator[None]:
    """Say of a fault at which step it came. Raises as `storage_faults`."""
    try:
        with storage_faults(store.uri("")):
            yield
    except IngestdError as error:
        if not isinstance(error, _OverwritesError):
            error.what = f"{what}: {error.what}"
        raise

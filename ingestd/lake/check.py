"""`ingestd check` for the lake: whether commits succeed, and conflicting commits are refused.

Also whether this version may write there, and who wrote last.

The probe removes everything that it creates, including the lake's own folder.
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

from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.fencing import SEPARATE, drop_of
from ingestd.lake.lake_id import read_lake_id
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.store import Store, open_store
from ingestd.model.check import CheckLine
from ingestd.model.errors import IngestdError, OperatorError

CONTESTS = 6
"""Maximum number of races of two commits in an object store, until both try the same version."""
_CONTENT = b"probe"
_SCHEMA = Schema([Field("probe", PrimitiveType("string"))])
_REMEDY = "check `lake.uri` and `[lake.storage_options]`, and that the store is reachable"
_THERE_ALREADY = "already exists"
_NOT_KNOWN = "<Code>NotImplemented</Code>"
"""How an S3 store answers a header that it does not implement."""
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


class _OverwritesError(OperatorError):
    def __init__(self) -> None:
        super().__init__(
            "the store does not refuse a put with If-None-Match where the object exists:"
            " two writers could overwrite each other's commits",
            remedy="use a store that does, such as S3, GCS, Azure, MinIO or R2, or a newer version",
        )


def probe(uri: str, storage_options: Mapping[str, str] | None = None) -> CheckLine:
    """Write, read, list and remove a small file, then try to overwrite a commit. Blocks."""
    subject = f"lake {uri}"
    try:
        store = open_store(uri, storage_options)
        with _folder_of(store):
            _try_file(store)
            is_sure = _try_second_commit(store)
    except IngestdError as error:
        return CheckLine("", subject, "fail", error.what, error.remedy or _REMEDY)
    if not is_sure:
        detail = "writable; could not determine whether it refuses a second commit"
        return CheckLine("", subject, "warn", detail, "run it again; see docs/object-stores.md")
    detail = f"writable; {store.remark}" if store.remark else "writable"
    return CheckLine("", subject, "ok", detail)


def check_lake_id(uri: str, storage_options: Mapping[str, str] | None = None) -> CheckLine | None:
    """Return a failure if the lake's id file can't be read or has a newer version. Blocks."""
    try:
        read_lake_id(open_store(uri, storage_options))
    except IngestdError as error:
        return CheckLine("", f"lake {uri}", "fail", error.what, error.remedy)
    return None


async def check_writer(lake: DeltaLake, source: str) -> CheckLine | None:
    """Return a warning if another ingestd, which may still run, wrote the source's lake last."""
    subject = f"lake {lake.uri}"
    try:
        other = await lake.last_claim()
    except IngestdError as error:
        return CheckLine(source, subject, "warn", error.what, error.remedy)
    finally:
        await lake.close()
    if other is None:
        return None
    detail = f"last written by {other}, not by this config; `ingestd run` takes over"
    remedy = f"if both must run, {SEPARATE}{drop_of(other)}"
    return CheckLine(source, subject, "warn", detail, remedy)


@contextmanager
def _folder_of(store: Store) -> Iterator[None]:
    """Create the lake's folder; on exit remove the folders that did not exist before."""
    root = Path(store.uri("")) if isinstance(store, LocalStore) else None
    missing = [] if root is None else [p for p in (root, *root.parents) if not p.exists()]
    try:
        with storage_faults(store.uri("")):
            store.make_folder("")
        yield
    finally:
        for folder in missing:
            with suppress(OSError):  # a daemon that starts meanwhile keeps it
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
            raise OperatorError(f"{store.uri(name)}: the content read back differs")
        with _step(store, "can't list"):
            names = store.files("")
        if name not in names:
            raise OperatorError(f"{store.uri(name)}: the file was written but is not listed")
    except IngestdError:
        with suppress(Exception):  # report the first fault
            store.remove(name)
        raise
    with _step(store, "can't delete"):
        store.remove(name)


def _try_second_commit(store: Store) -> bool:
    """Return whether a second commit was seen to be refused. Raise OperatorError if it succeeds."""
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
            f"{store.uri('')}: this file system has no hard links, which ingestd needs to refuse a"
            " commit whose version exists",
            remedy="choose a folder on a file system with hard links, such as ext4, XFS or NFS",
        ) from error
    finally:
        with suppress(OSError):
            store.remove(name)
    if is_second:
        raise _OverwritesError
    if not is_there:
        raise OperatorError(
            "the store refuses a put with If-None-Match although the object does not exist",
            remedy="check whether a proxy between this host and the store alters such requests",
        )


def _is_refused(store: Store) -> bool:
    """Race two creations of one table through deltalake. Return False if they did not collide.

    Each creation first checks whether the table exists. If both find none, both put version 0.
    Then either the store refuses the second, which retries as version 1, or it overwrites the
    first.
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
        with suppress(Exception):  # the probe of a file reports this fault
            store.remove_folder(name)
    return have_met


def _new_name() -> str:
    return f"_ingestd_probe_{uuid.uuid4().hex}"


@contextmanager
def _step(store: Store, what: str) -> Iterator[None]:
    """Prefix a fault with the step that failed. Raise as `storage_faults` does."""
    try:
        with storage_faults(store.uri("")):
            yield
    except IngestdError as error:
        if not isinstance(error, _OverwritesError):
            error.what = f"{what}: {error.what}"
        raise

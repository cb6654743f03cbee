"""The classification of failed storage calls: either an operator must act, or a retry helps.

deltalake reports the cause only as text (object_store's messages, with the errno of a local file
system as ``(os error N)``).
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from deltalake.exceptions import DeltaError

from ingestd.lake.store.paths import OddFileError, OddPathError
from ingestd.lake.store.plain_files import OthersLinkError
from ingestd.model.errors import (
    DamagedError,
    FolderError,
    IngestdError,
    OperatorError,
    TableError,
    TransientError,
    resnapshot_command,
)
from ingestd.model.schema import TableId
from ingestd.process.file_limit import none_left

_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_DECORATION = re.compile(r"\x1b\[[0-9;]*m|↳")
"""Colours and arrows in which deltalake prints the chain of causes."""
_FRAMES = re.compile(r"\n\s*0: .*", re.DOTALL)
"""The stack trace that delta-kernel appends."""
_OF_VALUES = re.compile(
    r"\b(?P<kind>(?:cast|parser|compute|csv|json|execution|invalid argument) error"
    r"|arithmetic overflow|invalid json\b[^,:=`]*|invalid (?:type|value)|unknown variant"
    r"|data does not satisfy[^:]*)\b(?P<what>.*)",
    re.IGNORECASE,
)
"""Errors that quote their input after these words, such as statistics, which contain values."""
_PLACES = re.compile(
    r": (?:truncated record whilst reading \w+|encountered unexpected .{1,4} whilst parsing [\w ]+"
    r"|EOF while parsing [\w ]+(?: at line \d+ column \d+)?)",
    re.IGNORECASE,
)
"""Continuations of such errors that quote nothing."""
_CUT_SHORT = re.compile(r"truncated record|EOF while parsing", re.IGNORECASE)
_DAMAGED = re.compile(r"Parquet (magic bytes|file size)|deserialize thrift|Corrupt", re.IGNORECASE)
"""What pyarrow reports of a Parquet file that is truncated, empty or overwritten."""
_PASSES = re.compile(
    r"timed? ?out|too many requests|slow ?down|throttl|service unavailable|internal server error"
    r"|\b(?:status|code|http)\W{0,3}(?:429|50[0234])\b|\b(?:429|50[0234]) [A-Z]"
    r"|connection (?:refused|reset|closed|aborted|error)|error trying to connect|reset by peer"
    r"|dns error|temporar|error sending request|max_retries"
    r"|error reading a body|end of file before message|(?:request|response) body error",
    re.IGNORECASE,
)
_PASSES_ANYWAY = re.compile(r"NoSuchUpload|ConditionalRequestConflict")
"""Codes of S3: a file's upload was ended by another request, or two requests conflicted."""
_STAYS = re.compile(
    r"access ?denied|forbidden|unauthori[sz]ed|not ?found|no ?such ?(?:key|bucket)|invalid",
    re.IGNORECASE,
)
"""Words that mean that no retry helps, even if words for a passing fault appear as well."""
_REMEDIES = {
    errno.ENOSPC: ("the disk is full", "free space there; ingestd retries automatically"),
    errno.EDQUOT: ("the disk quota is used up", "raise it or free space there"),
    errno.EACCES: ("permission denied", "let the daemon's user read and write there"),
    errno.EPERM: ("operation not permitted", "let the daemon's user read and write there"),
    errno.EROFS: ("the file system is read-only", "remount it, or set `lake.uri` elsewhere"),
    errno.EFBIG: (
        "a file would exceed the size limit",
        "raise the limit on file sizes (ulimit -f, LimitFSIZE=); ingestd retries automatically",
    ),
    errno.ENOENT: (
        "a file or folder that existed is missing",
        "put it back; ingestd checks again automatically, and reports what else can be done",
    ),
    errno.ENOTDIR: ("a file exists where a folder should be", "move it, or set `lake.uri`"),
}
_PUT_BACK = (
    "put it back from a copy; or, for a raw table, move the table's folder away and re-read the"
    " table: `ingestd snapshot`"
)
_DENIED = frozenset({errno.EACCES, errno.EPERM})
_OF_ONE_FOLDER = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR})
_ERRNO_PASSES = frozenset(
    {
        *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENFILE),
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE),
        *(errno.EHOSTUNREACH, errno.ENETUNREACH),
    }
)
_SHOWN = 80
_EXPIRED = re.compile(
    r"ExpiredToken|TokenRefreshRequired|RequestExpired|token[^.<]{0,40}expired", re.IGNORECASE
)
_NO_CREDENTIALS = re.compile(
    r"loading credentials|missing (?:secret ?access ?key|access ?key ?id)", re.IGNORECASE
)
_ANSWER = re.compile(r"<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?", re.DOTALL)
"""An S3 store's error, at the end of a text that begins with the request."""


_UNREADABLE = re.compile(
    r"json|metadata|protocol|schema|checkpoint|unsupported|not supported|contiguous|delta kernel"
    r"|invalid table version|kernel error(?!.*(?:object.?store|Generic \w+ error))",
    re.IGNORECASE,
)
"""What deltalake reports of a log that it can't interpret, or whose protocol it lacks."""


def table_fault(fault: FolderError, source: str, table: TableId, uri: str) -> TableError:
    """Return the fault of a raw table's folder as that table's own (I8)."""
    again = resnapshot_command(source, table)
    moved = _moved_away(fault, uri, depth=3)
    then = f" && {again}" if ": " in moved else f"; then: {again}"
    right = _put_right(fault, uri)
    return TableError(table, fault.what, remedy=f"{right}, or {moved}{then}")


def reference_fault(fault: FolderError, table: TableId, uri: str) -> TableError:
    """Return the fault of a reference table's folder as that table's own (I8)."""
    return TableError(
        table,
        fault.what,
        remedy=f"{_put_right(fault, uri)}, or {_moved_away(fault, uri, depth=4)};"
        " ingestd re-creates the table from the source's rows within a minute",
    )


def _put_right(fault: FolderError, uri: str) -> str:
    if isinstance(fault, LinkError):
        return fault.allowed()
    undo = fault.undo if isinstance(fault, FeatureError) else ""
    return f"repair {uri}" + (f" (in Spark: {undo})" if undo else "")


def _moved_away(fault: FolderError, uri: str, *, depth: int) -> str:
    """Return how to move a folder, or the link that leads to it, away, with the command.

    The target is outside the lake, which is `depth` folders above: inside, the folder would be
    taken for another table. For an object store there is no command.
    """
    if "://" in uri:
        return "move that folder away"
    folder = uri.rstrip("/")
    lake = folder.rsplit("/", depth)[0]
    beside = f'"$(mktemp -d {shlex.quote(lake)}.XXXXXX)"'
    if isinstance(fault, LinkError):
        return f"move that link away: mv {shlex.quote(fault.link)} {beside}"
    return f"move that folder away: mv {shlex.quote(folder)} {beside}"


@contextmanager
def unreadable(uri: str) -> Iterator[None]:
    """Raise FolderError for the libraries' errors about a log whose actions are malformed."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, pa.ArrowException) as error:
        raise FolderError(
            f"lake table {uri}: its log can't be read: {type(error).__name__}"
        ) from error


def storage_fault(error: Exception, uri: str) -> IngestdError:
    """Classify an error of deltalake, pyarrow or the system about `uri`."""
    if isinstance(error, OddFileError):
        return _odd_file(error, uri)
    return _by_text(error, uri)


class LinkError(FolderError):
    """A symbolic link made by another user leads to a folder of the lake. `link`: its path."""

    def __init__(self, error: OthersLinkError, uri: str) -> None:
        self.link = error.path
        super().__init__(
            f"lake {uri}: {error.path} {error.why}",
            remedy=f'move it away: mv {shlex.quote(self.link)} "$(mktemp -d)", and restore the'
            f" original; {self.allowed()}; ingestd retries within 60 s",
        )

    def allowed(self) -> str:
        """Return how the operator who made the link can have it followed."""
        return f"if you made it: sudo chown -h {os.geteuid()} {shlex.quote(self.link)}"


def _odd_file(error: OddFileError, uri: str) -> FolderError:
    if isinstance(error, OthersLinkError):
        return LinkError(error, uri)
    if isinstance(error, OddPathError):
        return FolderError(
            f"lake {uri}: it names the path {error.path[:_SHOWN]!a}, {error.why}: nothing there is"
            " read, written or removed",
            remedy=f"put {uri} back from a copy; ingestd retries within 60 s",
        )
    away = "" if "://" in error.path else f': mv {shlex.quote(error.path)} "$(mktemp -d)"'
    return FolderError(
        f"lake {uri}: {error.path} {error.why}",
        remedy=f"move it away{away}; if it replaced a file, put that back from a copy;"
        " ingestd retries within 60 s",
    )


def _by_text(error: Exception, uri: str) -> IngestdError:
    text = str(error)
    system = _OS_ERROR.search(text)
    number = int(system[1]) if system else getattr(error, "errno", None)
    if number in _REMEDIES or number == errno.EMFILE:
        return _known(number, uri)
    answer = _ANSWER.search(text)
    told = ": ".join(filter(None, answer.groups())) if answer else text
    told = _FRAMES.sub("", _DECORATION.sub(" ", told))
    full = " ".join(told.split())[:300]
    said = _without_values(full) or type(error).__name__
    lacking = _credentials_fault(text, uri, said) if number is None else None
    if lacking is not None:
        return lacking
    passes = _PASSES_ANYWAY.search(text) or (_PASSES.search(text) and not _STAYS.search(text))
    if number in _ERRNO_PASSES or (number is None and passes):
        return TransientError(f"lake {uri}: {said}", reason="storage")
    if _DAMAGED.search(full):
        return DamagedError(
            f"lake {uri}: a data file is damaged: {said}",
            remedy=_PUT_BACK,
        )
    if _CUT_SHORT.search(full):
        return cut_short(uri, said)
    # An unknown error may concern the complete lake, so it does not count as one table's fault.
    kind = FolderError if _UNREADABLE.search(full) else OperatorError
    return kind(
        f"lake {uri}: {said}",
        remedy="check `lake.uri` and `[lake.storage_options]`, and that the table is not damaged",
    )


def _without_values(text: str) -> str:
    """Return a library's text up to where it may quote its input."""
    found = _OF_VALUES.search(text)
    if found is None:
        return text
    place = _PLACES.match(found["what"])
    return text[: found.end("kind")] + (place[0] if place else "")


def cut_short(uri: str, said: str = "its newest commit") -> FolderError:
    """Return the error for a truncated log file."""
    return FolderError(
        f"lake {uri}: a file of the table's log is truncated: {said}",
        remedy="put the table's folder back from a copy; or move it away, and restart"
        " `ingestd run`",
    )


def _credentials_fault(text: str, uri: str, said: str) -> OperatorError | None:
    if _EXPIRED.search(text):
        return OperatorError(
            f"lake {uri}: {said}",
            remedy="renew the credentials; ingestd retries automatically, but reads those in"
            " `[lake.storage_options]` only at a start",
        )
    if _NO_CREDENTIALS.search(text) and not _PASSES.search(text):
        return OperatorError(
            f"lake {uri}: no credentials: {said}",
            remedy="set the store's keys, in `[lake.storage_options]` or in the environment",
        )
    return None


def _known(number: int, uri: str) -> IngestdError:
    if number == errno.EMFILE:
        return none_left(f"lake {uri}")
    cause, remedy = _REMEDIES[number]
    if number in _DENIED and "://" not in uri:
        path = shlex.quote(uri)
        made = "" if os.path.lexists(uri) else f"sudo mkdir -p {path} && "
        remedy += f": {made}sudo chown -R {os.getuid()} {path} && sudo chmod -R u+rwX {path}"
    if number == errno.ENOENT and uri.endswith(".parquet"):
        return DamagedError(f"lake {uri}: {cause}", remedy=_PUT_BACK)
    if number in _OF_ONE_FOLDER:
        return FolderError(f"lake {uri}: {cause}", remedy=remedy)
    return OperatorError(f"lake {uri}: {cause}", remedy=remedy)


@contextmanager
def storage_faults(uri: str) -> Iterator[None]:
    """Raise errors of the block as `storage_fault` classifies them."""
    try:
        yield
    except (DeltaError, OSError) as error:
        raise storage_fault(error, uri) from error
    except pa.ArrowInvalid as error:
        if not _DAMAGED.search(str(error)):  # a fault of the caller
            raise
        raise storage_fault(error, uri) from error


class FeatureError(FolderError):
    """A table feature prevents an operation.

    `undo`: the statement for Spark that removes the feature, with ``{t}`` for the table; or empty.
    """

    def __init__(self, uri: str, what: str, undo: str) -> None:
        path = uri.removeprefix("file://").rstrip("/").replace("`", "``")
        self.undo = undo.format(t=f"delta.`{path}`")
        back = "put the folder back from a copy"
        super().__init__(
            f"lake table {uri.removeprefix('file://')}: {what}",
            remedy=f"in Spark: {self.undo}; or {back}" if undo else back,
        )

"""The classification of failed storage calls: either an operator must act, or a retry helps.

A writer of one table's folder decides what its files contain and how they are named, and the
libraries quote both. So one rule decides which faults are the source's (I8): those that the store
itself reports of itself. That is an errno of the disk, the process or the connection; or, as
deltalake reports a store's errors only as text, the *cause* at the end of a text that begins with
the store's own words, without the names, addresses and quotations in it. All other errors about a
folder are that folder's. (object_store appends the errno of a local file system: ``(os error N)``.)
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from deltalake.exceptions import CommitFailedError, DeltaError

from ingestd.lake.store.paths import OddFileError, OddPathError
from ingestd.lake.store.plain_files import OthersLinkError
from ingestd.model.errors import (
    MOST_QUOTED,
    DamagedError,
    FolderError,
    IngestdError,
    OperatorError,
    TableError,
    TransientError,
    resnapshot_command,
)
from ingestd.model.printable_text import printable, printable_command
from ingestd.model.schema import TableId
from ingestd.process.file_limit import none_left

_OS_ERROR = re.compile(r"\(os error (\d+)\)\s*\Z")
_OF_STORE = re.compile(
    r"(?:(?:Kernel error|Arrow error|Parquet error|External(?: error)?|Log storage error"
    r"|Failed to commit transaction|Transaction failed)(?::| ->)? )*"
    r"(?:Generic (?!delta)\w+(?: client)? error|Error (?:performing|getting|joining) |HTTP "
    r"|operation timed out|tcp connect|after \d+ retries|\d{3} [A-Z]"
    r"|(?P<object>Object at location |The operation lacked the necessary privileges )"
    r"|The operation lacked |Request precondition|Operation not supported)",
    re.IGNORECASE,
)
"""How a text begins that object_store wrote. Names of files may follow, nothing of their content.
`object`: the store refused access to one object, or it does not exist."""
_ON_DISK = "Generic LocalFileSystem error"
"""How such a text begins for local files. Faults of a disk or of this process have an errno."""
_ENDS_WITH_NAME = re.compile(r"\W*Unable to walk dir\W+File system loop|\W*Filenames containing")
"""How such a text continues if a name ends it, which may look like an errno."""
_REQUEST = "Error performing "
_NAMES = re.compile(r"\w+://\S+|'[^']*'|\"[^\"]*\"|`[^`]*`|\S*/\S*")
"""Addresses, quotations and paths in such a text."""
_OF_ONE_OBJECT = frozenset({"", "NoSuchKey", "AccessDenied"})
"""Codes of a store's answer about an object, not about the store."""
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
_CHECK = "check `lake.uri` and `[lake.storage_options]`, and that the table is not damaged"
_DENIED = frozenset({errno.EACCES, errno.EPERM})
_OF_ONE_FOLDER = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR})
_ERRNO_PASSES = frozenset(
    {
        *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENFILE),
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE),
        *(errno.EHOSTUNREACH, errno.ENETUNREACH),
    }
)
_MALFORMED = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    pa.ArrowException,
)
_SHOWN = 80
_FILE = re.compile(r"file:(?://)?(?=/)")
_EXPIRED = re.compile(
    r"ExpiredToken|TokenRefreshRequired|RequestExpired|token[^.<]{0,40}expired", re.IGNORECASE
)
_NO_CREDENTIALS = re.compile(
    r"loading credentials|missing (?:secret ?access ?key|access ?key ?id)", re.IGNORECASE
)
_ANSWER = re.compile(r"<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?", re.DOTALL)
"""An S3 store's error, at the end of a text that begins with the request."""


def table_fault(fault: FolderError, source: str, table: TableId, uri: str) -> TableError:
    """Return the fault of a raw table's folder as that table's own (I8)."""
    again = resnapshot_command(source, table)
    moved = _removal_remedy(fault, uri, depth=3)
    then = f" && {again}" if ": " in moved else f"; then: {again}"
    right = _repair_remedy(fault, uri)
    return TableError(table, fault.what, remedy=f"{right}, or {moved}{then}")


def reference_fault(fault: FolderError, table: TableId, uri: str) -> TableError:
    """Return the fault of a reference table's folder as that table's own (I8)."""
    return TableError(
        table,
        fault.what,
        remedy=f"{_repair_remedy(fault, uri)}, or {_removal_remedy(fault, uri, depth=4)};"
        " ingestd re-creates the table from the source's rows within a minute",
    )


def _repair_remedy(fault: FolderError, uri: str) -> str:
    if isinstance(fault, LinkError):
        return fault.allowed()
    undo = fault.undo if isinstance(fault, FeatureError) else ""
    return f"repair {uri}" + (f" (in Spark: {undo})" if undo else "")


def _removal_remedy(fault: FolderError, uri: str, *, depth: int) -> str:
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
    except _MALFORMED as error:
        raise FolderError(
            f"lake table {uri}: its log can't be read: {type(error).__name__}"
        ) from error


def storage_fault(error: Exception, uri: str) -> IngestdError:
    """Classify an error of deltalake, pyarrow or the system about `uri`."""
    if isinstance(error, OddFileError):
        return _odd_file(error, uri)
    return _by_cause(error, uri)


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
    path = _FILE.sub("", error.path)  # as Spark names files
    away = "" if "://" in path else f': mv {printable_command([path])} "$(mktemp -d)"'
    return FolderError(
        f"lake {uri}: {path} {error.why}",
        remedy=f"move it away{away}; if it replaced a file, put that back from a copy;"
        " ingestd retries within 60 s",
    )


def _by_cause(error: Exception, uri: str) -> IngestdError:
    plain = " ".join(_FRAMES.sub("", _DECORATION.sub(" ", str(error))).split())
    by_store = _OF_STORE.match(plain)
    number = getattr(error, "errno", None)
    if number is None and by_store and not _ENDS_WITH_NAME.match(plain, by_store.end()):
        system = _OS_ERROR.search(plain)
        number = int(system[1]) if system else None
    if number in _REMEDIES or number == errno.EMFILE:
        return _known(number, uri)
    if number is None and by_store:
        return _of_store(plain, by_store, uri)
    full = plain[:300]
    reported = _without_values(full) or type(error).__name__
    if number in _ERRNO_PASSES or isinstance(error, CommitFailedError):
        # After a conflict the log is read again: what another program wrote is judged there.
        return TransientError(f"lake {uri}: {reported}", reason="storage")
    if _DAMAGED.search(full):
        return DamagedError(
            f"lake {uri}: a data file is damaged: {reported}",
            remedy=_PUT_BACK,
        )
    if _CUT_SHORT.search(full):
        return truncated_log_error(uri, reported)
    return FolderError(f"lake {uri}: {reported}", remedy=_CHECK)


def _of_store(plain: str, by_store: re.Match[str], uri: str) -> IngestdError:
    """Classify a store's error without an errno. Its cause follows the names in it.

    `by_store`: its beginning, as _OF_STORE has it.
    """
    is_of_object = by_store["object"] is not None
    cause = plain.rpartition(_REQUEST)[2]
    answer = _ANSWER.search(cause)
    code = answer[1] if answer else ""
    message = ": ".join(filter(None, answer.groups())) if answer else plain
    reported = _without_values(message[:300])
    is_of_folder = by_store[0].endswith(_ON_DISK)
    if not is_of_folder and (not is_of_object or code not in _OF_ONE_OBJECT):
        cause = f"{_NAMES.sub(' ', cause.partition('<')[0])} {code}"  # the answer quotes names
        lacking = _credentials_fault(cause, uri, reported)
        if lacking is not None:
            return lacking
        if _PASSES_ANYWAY.search(cause) or (_PASSES.search(cause) and not _STAYS.search(cause)):
            return TransientError(f"lake {uri}: {reported}", reason="storage")
        if code not in _OF_ONE_OBJECT or not code:
            return OperatorError(f"lake {uri}: {reported}", remedy=_CHECK)
    return FolderError(f"lake {uri}: {reported}", remedy=_CHECK)


def _without_values(text: str) -> str:
    """Return a library's text, printable, up to where it may quote its input."""
    text = printable(text)
    found = _OF_VALUES.search(text)
    if found is None:
        return text
    place = _PLACES.match(found["what"])
    return text[: found.end("kind")] + (place[0] if place else "")


def truncated_log_error(uri: str, reported: str = "its newest commit") -> FolderError:
    """Return the error for a truncated log file."""
    return FolderError(
        f"lake {uri}: a file of the table's log is truncated: {reported}",
        remedy="put the table's folder back from a copy; or move it away, and restart"
        " `ingestd run`",
    )


def _credentials_fault(text: str, uri: str, reported: str) -> OperatorError | None:
    if _EXPIRED.search(text):
        return OperatorError(
            f"lake {uri}: {reported}",
            remedy="renew the credentials; ingestd retries automatically, but reads those in"
            " `[lake.storage_options]` only at a start",
        )
    if _NO_CREDENTIALS.search(text) and not _PASSES.search(text):
        return OperatorError(
            f"lake {uri}: no credentials: {reported}",
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


def is_library_error(error: Exception) -> bool:
    """Return whether deltalake or the system raised it.

    deltalake raises some faults of a table, such as a column whose name differs from another's by
    case only, as plain Exceptions; nothing else does.
    """
    return isinstance(error, (DeltaError, OSError)) or type(error) is Exception


@contextmanager
def storage_faults(uri: str) -> Iterator[None]:
    """Raise errors of the block as `storage_fault` classifies them."""
    try:
        yield
    except pa.ArrowInvalid as error:
        if not _DAMAGED.search(str(error)):  # a fault of the caller
            raise
        raise storage_fault(error, uri) from error
    except Exception as error:
        if not is_library_error(error):
            raise
        raise storage_fault(error, uri) from error


class FeatureError(FolderError):
    """A table feature prevents an operation.

    `undo`: the statement for Spark that removes the feature, with ``{t}`` for the table; or empty.
    """

    def __init__(self, uri: str, what: str, undo: str) -> None:
        path = uri.removeprefix("file://").rstrip("/").replace("`", "``")
        undo = undo.format(t=f"delta.`{path}`")
        self.undo = undo if len(undo) <= MOST_QUOTED else ""
        back = "put the folder back from a copy"
        super().__init__(
            f"lake table {uri.removeprefix('file://')}: {what}",
            remedy=f"in Spark: {self.undo}; or {back}" if self.undo else back,
        )

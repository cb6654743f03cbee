"""The token for commands if `[http]` sets none: generated at each start, stored in a private file.

The daemon writes the file and never reads it, so replacing the file gives no access. /status
reports its path to clients on the same machine, which read it with the checks of `read_token`,
because any server on the port could name any path. A token is worthless once its daemon has ended:
a process that takes over the port gains nothing from receiving it. Such a process must not know
the token either: it could then prove so, and would receive a command's SQL condition. So the file
must belong to a trusted account: root, the client's own, or, for root, the one that owns a folder
named `ingestd...` which root created.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import re
import secrets
import shlex
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ingestd.config.units import is_loopback
from ingestd.model.errors import OperatorError
from ingestd.model.printable_text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from aiohttp import web

_TOKEN_BYTES = 32
_TOKEN = re.compile(rb"[0-9a-f]{64}\n")
_NAME = re.compile(r"http-[A-Za-z0-9.-]{1,64}-(\d{1,5})\.token")
_OTHERS = 0o077
_WRITTEN_BY_ANYBODY, _WRITTEN_BY_OTHERS = 0o002, 0o022
_OWN_NAME = "ingestd"
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


OFF_REMEDY = (
    "set `token` in [http], or STATE_DIRECTORY to a folder of the daemon's user, and restart it"
)


class _UnusableError(Exception):
    """A folder that must not hold a token."""


class _OfAnotherError(_UnusableError):
    """A file that belongs to an account which this one does not trust."""

    def __init__(self, owner: int) -> None:
        super().__init__(f"it belongs to another account, {_user(owner)}")
        self.owner = owner


@dataclass(slots=True)
class CommandToken:
    """The token that commands need. `path`: its file; None: not written, see `off`.

    `off`: why commands are not accepted; None if they are.
    """

    path: Path | None = None
    off: str | None = "the token has not been written yet"
    _token: str | None = field(default=None, repr=False)
    _inode: tuple[int, int] | None = None

    def write(self, port: int, environ: Mapping[str, str]) -> None:
        """Generate a token and write its file into the first usable folder. Never raises."""
        name = f"http-{_host_name()}-{port}.token"
        why: list[str] = []
        for open_folder in _folders(environ):
            try:
                folder = open_folder()
                token = secrets.token_hex(_TOKEN_BYTES)
                self._inode = _write_in(folder, name, token)
            except (_UnusableError, OSError, RuntimeError) as error:
                why.append(_reason(error))
                continue
            self.path, self.off, self._token = folder / name, None, token
            return
        self.off = f"no usable folder for the token file: {'; '.join(why)}"

    def remove(self) -> None:
        """Remove the file, unless it was replaced."""
        if self.path is None:
            return
        with contextlib.suppress(OSError):
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == self._inode:
                self.path.unlink()
            if self.path.parent.name.startswith(_TEMPORARY):
                self.path.parent.rmdir()

    def value(self) -> str | None:
        """Return the token; None until it is written."""
        return self._token

    @staticmethod
    def is_from_here(request: web.Request) -> bool:
        """Return whether the request comes from this machine and so did not cross a network."""
        transport = request.transport
        if transport is None:
            return False
        peer, own = (transport.get_extra_info(name) for name in ("peername", "sockname"))
        return bool(peer) and bool(own) and is_same_machine(peer[0], own[0])

    def to_json(self) -> dict[str, str | None]:
        """Return its part of /status; file and user are None if the config sets the token."""
        path = None if self.path is None else str(self.path)
        return {
            "token_file": path,
            "user": None if path is None else _user(os.geteuid()),
            "off": self.off,
        }


def why_off(environ: Mapping[str, str]) -> str | None:
    """Return why a daemon of this account could not write its token's file; None if it could."""
    tried = CommandToken()
    tried.write(0, environ)
    tried.remove()
    return tried.off


CONFIGURED = CommandToken(off=None)
"""Used if `[http] token` is set, which commands then need: no file is written."""


def is_same_machine(peer: str, own: str) -> bool:
    """Return whether the addresses show that both ends of a connection are on one machine."""
    return peer == own or is_loopback(peer)


def read_token(answer: Mapping[str, object], port: int) -> str:
    """Return the token of the daemon on `port` of this machine, from the file its /status names.

    `answer`: the part of /status. Only a regular file is read whose name and content are as
    `CommandToken` writes them, which belongs to root or this account (for root, also to its
    folder's owner, see `_is_by_root`) and which no other account can read. Raises OperatorError.
    """
    path, user = Path(str(answer.get("token_file"))), str(answer.get("user"))
    named = _NAME.fullmatch(path.name)
    if not path.is_absolute() or named is None or int(named[1]) != port:
        raise OperatorError(
            f"the server on port {port} names {_text(path)} as its token file, which is not a name "
            "that a daemon on this port uses",
            remedy="check with `ss -ltnp` which process listens there",
        )
    try:
        with _folder(path.parent) as folder:
            owners = {0, os.geteuid()}
            if os.geteuid() == 0 and _is_by_root(path.parent):
                owners.add(os.fstat(folder).st_uid)
            return _read_in(folder, path.name, owners)
    except FileNotFoundError as error:
        raise OperatorError(
            f"the daemon's token is in {_text(path)}, which does not exist on this machine or in "
            "this container",
            remedy="run the command where the daemon runs (docker exec, kubectl exec), or restart "
            "the daemon if the file was removed",
        ) from error
    except PermissionError as error:
        raise OperatorError(
            f"the daemon's token is in {_text(path)}, which this account may not read",
            remedy=f"run the command as {_text(user)} or root: sudo -u {shlex.quote(user)} ...",
        ) from error
    except _OfAnotherError as error:
        raise OperatorError(
            f"the token in {_text(path)} is not trusted: {error}",
            remedy="if the daemon runs as that user, run the command as it: sudo"
            f" -u {shlex.quote(_user(error.owner))} ...; else check with `ss -ltnp` which process"
            f" listens on port {port}",
        ) from error
    except (_UnusableError, OSError) as error:
        raise OperatorError(
            f"the token in {_text(path)} is not trusted: {_reason(error)}",
            remedy=f"stop the daemon, rm {shlex.quote(str(path))}, and start it again",
        ) from error


def _is_by_root(path: Path) -> bool:
    """Return whether only root can have created this folder, and its name says for ingestd.

    systemd creates /var/lib/ingestd (`StateDirectory=`) like this for the daemon's user.
    """
    above = [parent.lstat() for parent in path.parents]
    return path.name.startswith(_OWN_NAME) and all(
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == 0
        and not stat.S_IMODE(found.st_mode) & _WRITTEN_BY_OTHERS
        for found in above
    )


_TEMPORARY = "ingestd-http-"


def _folders(environ: Mapping[str, str]) -> Iterator[Callable[[], Path]]:
    """Yield a function for each folder that may hold the file, the best first; it returns the path.

    First the service manager's, then the user's state folder (XDG Base Directory), then a new
    temporary one. None is in a lake.
    """
    given = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if given:
        yield lambda: Path(given).resolve(strict=True)
    yield lambda: _state_folder(environ)
    yield lambda: Path(tempfile.mkdtemp(prefix=_TEMPORARY))


def _state_folder(environ: Mapping[str, str]) -> Path:
    state = environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    if not state.startswith("/") and not Path.home().is_dir():
        raise _UnusableError("this account has no home folder")
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = base.resolve() / "ingestd"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[int]:
    """Open a folder. Raises _UnusableError if it is world-writable."""
    descriptor = os.open(path, _FOLDER_FLAGS)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & _WRITTEN_BY_ANYBODY:
            raise _UnusableError(f"its folder {_text(path)} is world-writable")
        yield descriptor
    finally:
        os.close(descriptor)


def _write_in(path: Path, name: str, token: str) -> tuple[int, int]:
    """Write the file, replacing an existing one; return its device and inode."""
    with _folder(path) as folder:
        if os.fstat(folder).st_uid != os.geteuid():
            raise _UnusableError(f"{_text(path)} belongs to another account")
        new = f".{name}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(new, flags, 0o600, dir_fd=folder)
        try:
            try:
                os.fchmod(descriptor, 0o600)
                found = os.fstat(descriptor)
                if stat.S_IMODE(found.st_mode) & _OTHERS:
                    raise _UnusableError(f"a file in {_text(path)} can't be made private")
                os.write(descriptor, f"{token}\n".encode())
            finally:
                os.close(descriptor)
            os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=folder)
            raise
        return found.st_dev, found.st_ino


def _read_in(folder: int, name: str, owners: set[int]) -> str:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise _UnusableError("it is not a regular file with a single link")
        if found.st_uid not in owners:
            raise _OfAnotherError(found.st_uid)
        if stat.S_IMODE(found.st_mode) & _OTHERS:
            raise _UnusableError("other accounts can read or write it")
        content = os.read(descriptor, 2 * _TOKEN_BYTES + 2)
    finally:
        os.close(descriptor)
    if _TOKEN.fullmatch(content) is None:
        raise _UnusableError("its content is not a token")
    return content.decode().strip()


def _reason(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    if error.errno == errno.ELOOP:
        return "it is a symbolic link"
    where = f"{_text(error.filename)}: " if error.filename else ""
    return f"{where}{error.strerror}"


def _text(name: object) -> str:
    return printable(str(name))


def _host_name() -> str:
    """Return the host's part of the file name: machines may share a home folder."""
    return re.sub(r"[^A-Za-z0-9.-]", "", os.uname().nodename)[:64] or "host"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"  # as sudo accepts it

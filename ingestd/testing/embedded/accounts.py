"""The account that runs a private server, as Postgres refuses to run as root."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingestd.model.errors import OperatorError

_CANDIDATES = ("postgres", "nobody")


@dataclass(frozen=True, slots=True)
class Account:
    """An account to run a server as, when this process is root."""

    name: str
    uid: int
    gid: int

    def own(self, path: Path) -> None:
        """Make this account the owner of this one path."""
        os.chown(path, self.uid, self.gid)

    def popen_arguments(self) -> dict[str, Any]:
        """Return arguments of subprocess.Popen by which the child runs as this account."""
        environment = {**os.environ, "HOME": "/", "USER": self.name, "LOGNAME": self.name}
        return {"user": self.uid, "group": self.gid, "extra_groups": [], "env": environment}

    def reaches(self, folder: Path) -> bool:
        """Return whether the account may pass through every folder from the root to `folder`."""
        return self.first_closed(folder) is None

    def first_closed(self, folder: Path) -> Path | None:
        """Return the first folder on the path that the account may not pass."""
        return next((p for p in (*reversed(folder.parents), folder) if not self._passes(p)), None)

    def _passes(self, folder: Path) -> bool:
        found = folder.stat()
        if found.st_uid == self.uid:
            return bool(found.st_mode & stat.S_IXUSR)
        if found.st_gid == self.gid:
            return bool(found.st_mode & stat.S_IXGRP)
        return bool(found.st_mode & stat.S_IXOTH)


def account_for_server() -> Account | None:
    """Return the account to run Postgres as: None (the current one) unless this process is root."""
    if os.geteuid() != 0:
        return None
    for name in _CANDIDATES:
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, found.pw_uid, found.pw_gid)
    what = "Postgres refuses to run as root, and neither account exists: `postgres`, `nobody`"
    raise OperatorError(what, remedy="useradd --system postgres, or run as an ordinary user")


def open_way(folder: Path, account: Account) -> None:
    """Let `account` reach `folder`, as far as only temporary folders must be changed.

    mkdtemp creates folders with mode 0700. Those below the temporary folder are made passable, but
    not listable. Other folders are never changed: raise OperatorError with the first of them.
    """
    temp = Path(tempfile.gettempdir()).resolve()
    while (closed := account.first_closed(folder.resolve())) is not None:
        if temp not in closed.parents:
            what = f"the account {account.name}, which Postgres runs as, can't pass {closed}"
            raise OperatorError(what, remedy=f"chmod o+x {closed}, or use another folder")
        closed.chmod(closed.stat().st_mode | stat.S_IXOTH)

"""The limit on open files, and the error when it is reached."""

from __future__ import annotations

import os
import resource

from ingestd.model.errors import TransientError

TOO_MANY_FILES = "Too many open files"
"""The system's error text, for libraries that report only the text."""


def are_left() -> bool:
    """Return whether this process can open another file now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True


def none_left(where: str) -> TransientError:
    """Return the error for failing to open anything at `where`. Transient: files may be closed."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return TransientError(
        f"{where}: no more files can be opened: the limit of this process is {limit}",
        reason="no_files",
        remedy="raise it and restart ingestd: LimitNOFILE=65536 in the systemd unit, `ulimit -n "
        "65536` in the shell, nofile in a container's ulimits",
    )

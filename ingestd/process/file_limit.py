"""The limit on open files, and what it means that there are no more."""

from __future__ import annotations

import os
import resource

from ingestd.model.errors import TransientError

SAID = "Too many open files"
"""What the system says, to libraries that tell it in words alone."""


def are_left() -> bool:
    """Return whether this process can open another file now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True


def none_left(where: str) -> TransientError:
    """Say that nothing can be opened at `where`: files may be closed by and by, or never."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return TransientError(
        f"{where}: no more files can be opened: the limit of this process is {limit}",
        reason="no_files",
        remedy="raise it and start ingestd anew: LimitNOFILE=65536 in the systemd unit, `ulimit -n "
        "65536` in the shell, nofile in a container's ulimits",
    )

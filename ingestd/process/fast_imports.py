"""Safe and fast imports, for the daemon and its child processes.

A child process imports nothing from the working directory, where other users may be able to write:
with `-m` and `-c` Python searches it before its own library.

A sixth of the daemon's start-up time is work that libraries do on import and a daemon never needs.
structlog imports rich, if installed (typer depends on it), to format tracebacks; `observe.traces`
formats them here. aiohttp builds its client's TLS contexts and loads all of the system's
certificates for them; only its server is used.
"""

from __future__ import annotations

import contextlib
import os
import site
import sys
from collections.abc import Iterator
from pathlib import Path

_UNUSED = "rich"
_CERTIFICATES = "SSL_CERT_FILE"
"""The environment variable that makes OpenSSL read this file instead of the system's."""


@contextlib.contextmanager
def sparing() -> Iterator[None]:
    """Skip that work within the context and restore everything after it. Not thread-safe."""
    is_there, certificates = _UNUSED in sys.modules, os.environ.get(_CERTIFICATES)
    os.environ[_CERTIFICATES] = os.devnull
    if not is_there:
        sys.modules[_UNUSED] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if not is_there:
            del sys.modules[_UNUSED]
        if certificates is None:
            del os.environ[_CERTIFICATES]
        else:
            os.environ[_CERTIFICATES] = certificates


def python_command(*words: str) -> list[str]:
    """Return the command of a child process that imports nothing from the working directory.

    Its environment must be `module_environment`.
    """
    return [sys.executable, "-P", *words]


def module_environment() -> dict[str, str]:
    """Return this process's environment, changed so that `python -m` finds this package."""
    parent = str(Path(__file__).parents[2])
    own = [] if parent in {*site.getsitepackages(), site.getusersitepackages()} else [parent]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [*own, *filter(os.path.isabs, inherited)]  # an empty entry is the working directory
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return {**environment, "PYTHONPATH": os.pathsep.join(path)} if path else environment

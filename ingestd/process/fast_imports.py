"""What is imported, and from where.

A child process imports nothing from the working directory, where others may be able to write: with
`-m` and `-c` Python looks there first, before its own library.

What libraries do while they are imported that a daemon has no use for is a sixth of its start.
structlog imports rich where that is there (typer brings it), to show tracebacks; `observe.traces`
does that here. aiohttp makes the TLS contexts of its client and reads all certificates of the
system for them; only its server is used.
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
"""Names the file that OpenSSL reads instead of the system's."""


@contextlib.contextmanager
def sparing() -> Iterator[None]:
    """Spare that meanwhile; all is as before afterwards. Before there are threads."""
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
    """Return the command of a child that imports nothing from the working directory.

    Its environment must be `module_environment`.
    """
    return [sys.executable, "-P", *words]


def module_environment() -> dict[str, str]:
    """Return this process's environment, in which `python -m` finds this package from anywhere."""
    parent = str(Path(__file__).parents[2])
    own = [] if parent in {*site.getsitepackages(), site.getusersitepackages()} else [parent]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [*own, *filter(os.path.isabs, inherited)]  # an empty entry is the working directory
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return {**environment, "PYTHONPATH": os.pathsep.join(path)} if path else environment

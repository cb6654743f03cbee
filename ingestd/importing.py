"""What libraries do while they are imported that a daemon has no use for: a sixth of its start.

structlog imports rich where that is there (typer brings it), to show tracebacks; `observe.traces`
does that here. aiohttp makes the TLS contexts of its client and reads all certificates of the
system for them; only its server is used.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

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

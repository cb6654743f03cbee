"""What is spared at the start is spared then only."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = """
import os, ssl, sys
from ingestd.importing import sparing
with sparing():
    import ingestd.app.daemon
    import aiohttp.connector
assert "rich" not in sys.modules
assert aiohttp.connector._SSL_CONTEXT_VERIFIED.cert_store_stats()["x509"] == 0
assert os.environ.get("SSL_CERT_FILE") == (sys.argv[1] if len(sys.argv) > 1 else None)
import rich.console
"""


@pytest.mark.parametrize("arguments", [[], ["/chosen.pem"]])
def test_neither_rich_nor_certificates_are_read_at_the_start(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    for path in arguments:
        monkeypatch.setenv("SSL_CERT_FILE", path)
    subprocess.run([sys.executable, "-c", START, *arguments], check=True)


def test_what_was_imported_before_stays() -> None:
    program = "import sys, rich\nfrom ingestd.importing import sparing\nwith sparing(): import rich"
    subprocess.run([sys.executable, "-c", program], check=True)

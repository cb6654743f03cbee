"""A real browser: Debian's chromium, driven by playwright.

``browser``
    module: started and stopped with the file's tests, which have to be plain functions:
    playwright's synchronous side runs a loop of its own in this thread.
``page``
    function: a fresh page; the test fails if a script failed or the CSP was broken in it.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
INSTALL = "no browser: sudo apt-get install --no-install-recommends chromium"
LIMIT_MS = 30_000
UNREACHED = "Failed to load resource: net::ERR_"


@pytest.fixture(scope="session")
def chromium() -> str:
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        pytest.fail(INSTALL)
    return found


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # root, as in CI containers, may not have the sandbox
        made = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def faults() -> list[str]:
    """What the browser complained of; a test that provokes something takes it away."""
    return []


@pytest.fixture
def page(browser: Browser, faults: list[str]) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1200, "height": 900}, locale="en-GB")
    context.set_default_timeout(LIMIT_MS)
    made = context.new_page()
    made.on("pageerror", lambda error: faults.append(str(error)))
    made.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
    made.on("response", lambda r: faults.append(f"{r.status} {r.url}") if not r.ok else None)
    yield made
    context.close()
    lost = [fault for fault in faults if fault.startswith(UNREACHED)]  # its server may have stopped
    assert faults == lost

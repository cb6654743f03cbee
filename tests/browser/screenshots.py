"""Redraws docs/images: `.venv/bin/python -m tests.browser.screenshots [FOLDER]`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.harness.page_server import PageServer
from tests.harness.page_states import STATES

if TYPE_CHECKING:
    from playwright.sync_api import Browser

IMAGES = Path(__file__).parents[2] / "docs" / "images"
DESK = {"viewport": {"width": 1100, "height": 900}}
PHONE = {"viewport": {"width": 360, "height": 780}}
COLOURS = 128
"""Pictures of a page need no more, and are a third of the size."""
PICTURES: list[tuple[str, str, dict[str, Any]]] = [
    ("status-healthy", "healthy", DESK),
    ("status-lagging", "lagging", DESK),
    ("status-stopped", "stopped", DESK | {"color_scheme": "dark"}),
    ("status-snapshotting", "snapshotting", DESK),
    ("status-phone", "stopped", PHONE),
]


def draw(browser: Browser, folder: Path, name: str, state: str, options: dict[str, Any]) -> None:
    with PageServer(*STATES[state]()) as served:
        context = browser.new_context(locale="en-GB", **options)
        page = context.new_page()
        page.goto(served.url)
        page.locator(".source .chart path.line[d^=M]").first.wait_for(state="attached")
        path = folder / f"{name}.png"
        page.screenshot(path=path)
        with Image.open(path) as drawn:
            small = drawn.convert("RGB").quantize(COLOURS)
        small.save(path, optimize=True)
        context.close()


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, state, options in PICTURES:
            draw(browser, folder, name, state, options)
        browser.close()


if __name__ == "__main__":
    main()

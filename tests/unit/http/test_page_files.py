"""The page's files, as they are served."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

import ingestd.http.page_files as served
from ingestd.config.redaction import Redactor
from ingestd.config.units import Address
from ingestd.http.auth import OPEN, Protection
from ingestd.http.server import HttpServer
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import DaemonStatus, SourceStatus
from tests.harness.page_server import NoCommands

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

T0 = datetime(2026, 1, 2, tzinfo=UTC)
FOLDER = Path(served.__file__).parent / "page"
LARGEST_BYTES = 100_000


@pytest.fixture(params=["open", "token"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[HttpServer]:
    protection = OPEN if request.param == "open" else Protection("the-token-of-it")
    status = DaemonStatus("0.1.0", T0, {"shop": SourceStatus("shop", T0)})
    listen = Address("127.0.0.1", 0)
    async with HttpServer(
        listen, Metrics(), status, Redactor(), NoCommands(), protection=protection
    ) as server:
        yield server


async def get(server: HttpServer, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    url = f"http://{server.address}{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, headers=headers) as response,
    ):
        return response.status, dict(response.headers), await response.text()


async def test_every_file_of_the_page_is_served_to_browsers(server: HttpServer) -> None:
    assert {p.name for p in FOLDER.iterdir()} == set(served.FILES)
    for path in served.PAGE_PATHS:
        code, headers, text = await get(server, path)
        assert code == 200, path
        assert headers["Content-Type"].endswith("; charset=utf-8")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Server"] == "ingestd"
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; connect-src 'self'")
        assert "unsafe" not in policy
        assert text == (
            FOLDER / (path.removeprefix("/page/") if path != "/" else "page.html")
        ).read_text("utf-8")


async def test_the_files_tell_nothing_of_the_daemon(server: HttpServer) -> None:
    assert "shop" not in "".join([(await get(server, path))[2] for path in served.PAGE_PATHS])


@pytest.mark.parametrize("path", ["/page/", "/page/../http.py", "/page/%2e%2e/http.py", "/page/x"])
async def test_nothing_else_is(server: HttpServer, path: str) -> None:
    assert (await get(server, path))[0] in {401, 404}


async def test_a_name_bound_to_loopback_is_given_no_page() -> None:
    status = DaemonStatus("0.1.0", T0)
    async with HttpServer(
        Address("127.0.0.1", 0), Metrics(), status, Redactor(), NoCommands()
    ) as server:
        assert (await get(server, "/", Host="evil.example"))[0] == 403
        assert (await get(server, "/status/events", Host="evil.example"))[0] == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_other_pages_get_no_events_but_may_lead_here(site: str) -> None:
    status = DaemonStatus("0.1.0", T0)
    mode = "Sec-Fetch-Mode"
    async with HttpServer(
        Address("127.0.0.1", 0), Metrics(), status, Redactor(), NoCommands()
    ) as server:
        for path in ("/status/events", "/status", "/metrics"):
            found = await get(server, path, **{"Sec-Fetch-Site": site, mode: "no-cors"})
            assert found[0] == 403
        for path in ("/", "/status"):
            found = await get(server, path, **{"Sec-Fetch-Site": site, mode: "navigate"})
            assert found[0] == 200
        assert (await get(server, "/status", **{"Sec-Fetch-Site": "same-origin"}))[0] == 200


def test_the_files_need_nothing_from_elsewhere_and_are_small() -> None:
    texts = {name: (FOLDER / name).read_text("utf-8") for name in served.FILES}
    assert sum(len(text.encode()) for text in texts.values()) < LARGEST_BYTES
    for name, text in texts.items():
        found = re.findall(r"(?:https?:)?//[a-z0-9.]+\.[a-z]+[^\s\"'<)]*", text)
        assert set(found) <= {"http://www.w3.org/2000/svg"}, name
        assert "innerHTML" not in text, name
        assert not re.search(r"\son[a-z]+\s*=\s*[\"']|style=\"", text), name


def test_every_module_exists_and_is_preloaded() -> None:
    html = (FOLDER / "page.html").read_text("utf-8")
    ahead = set(re.findall(r'href="page/(\w+\.js)"', html))
    scripts = {name for name in served.FILES if name.endswith(".js")}
    assert ahead | {"page.js"} == scripts
    for name in scripts:
        imported = re.findall(r'from "\./(\w+\.js)"', (FOLDER / name).read_text("utf-8"))
        assert set(imported) <= scripts

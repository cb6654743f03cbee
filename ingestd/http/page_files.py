"""The page at `/`: its files, which are the same for everybody, and what they may do.

They hold nothing of the daemon, so they are given without a token; what the page shows it asks for
itself (`ingestd.http.sse`). Browsers are told to run and load its own files only.
"""

from __future__ import annotations

from functools import partial
from importlib.resources import files

from aiohttp import web

_TYPES = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
_FILES = (
    "page.html",
    "page.css",
    "chart.js",
    "dom.js",
    "format.js",
    "icon-trouble.svg",
    "icon.svg",
    "lists.js",
    "model.js",
    "page.js",
    "signin.js",
    "source.js",
    "stream.js",
    "tables.js",
    "words.js",
)
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src 'self'; script-src 'self'; style-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
PAGE_PATHS = frozenset(("/", *(f"/page/{name}" for name in _FILES if name != "page.html")))


def add_page(app: web.Application) -> None:
    """Serve the page's files, which are read now."""
    folder = files("ingestd.http") / "page"
    for name in _FILES:
        body = (folder / name).read_bytes()
        path = "/" if name == "page.html" else f"/page/{name}"
        app.router.add_get(path, partial(_give, body, _TYPES[name.rpartition(".")[2]]))


async def _give(body: bytes, kind: str, _: web.Request) -> web.Response:
    return web.Response(
        body=body,
        content_type=kind,
        charset="utf-8",
        headers={"Content-Security-Policy": _POLICY},
    )

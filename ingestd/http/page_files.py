"""The files of the status page at `/`, and their content security policy.

The files contain no data of the daemon, so they are served without a token; the page requests its
data separately (`ingestd.http.sse`). The policy lets browsers run and load only the page's own
files.
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
FILES = (
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
PAGE_PATHS = frozenset(("/", *(f"/page/{name}" for name in FILES if name != "page.html")))


def add_page(app: web.Application) -> None:
    """Add a route for each file of the page; the files are read once, here."""
    folder = files("ingestd.http") / "page"
    for name in FILES:
        body = (folder / name).read_bytes()
        path = "/" if name == "page.html" else f"/page/{name}"
        app.router.add_get(path, partial(_respond, body, _TYPES[name.rpartition(".")[2]]))


async def _respond(body: bytes, kind: str, _: web.Request) -> web.Response:
    return web.Response(
        body=body,
        content_type=kind,
        charset="utf-8",
        headers={"Content-Security-Policy": _POLICY},
    )

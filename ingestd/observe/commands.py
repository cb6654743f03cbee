"""The requests that change something: taken on loopback only, and from no web page."""

from __future__ import annotations

import ipaddress
import json
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import web

from ingestd.errors import IngestdError, TransientError
from ingestd.schema import TableId

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ingestd.redaction import Redactor

    RequestSnapshot = Callable[[str, Sequence[TableId]], None]
    """Has tables of a source read anew. Raises OperatorError, TransientError."""

_JSON = "application/json"
_SHAPE = '{"tables": ["public.orders"]}'


class RefusedError(IngestdError):
    """A request that is answered with `code`."""

    def __init__(self, code: HTTPStatus, what: str, *, remedy: str | None = None) -> None:
        super().__init__(what, remedy=remedy)
        self.code = code


class SnapshotCommand:
    """``POST /sources/{source}/snapshot``: asks for a new snapshot of tables of a source.

    Body and answer are JSON: ``{"tables": ["public.orders"]}``, and 202 with the same and
    ``source``. Else ``{"error": ..., "remedy": ...}`` with 400 (not that), 403 (not on loopback),
    404 (no such source), 409 (not running now), 415 (not sent as JSON), 422 (no such table).
    Browsers send application/json to another site only where that site allows it, which this one
    never does; that the Host is loopback shuts out names that were bound to it anew.
    """

    def __init__(
        self, request_snapshot: RequestSnapshot, sources: Collection[str], redactor: Redactor
    ) -> None:
        self._request_snapshot = request_snapshot
        self._sources = sources
        self._redactor = redactor

    async def answer(self, request: web.Request, listening: Sequence[str]) -> web.Response:
        """Answer a request; `listening`: the hosts that the server listens on."""
        source = request.match_info["source"]
        try:
            _refuse_unless_local(request, listening)
            if source not in self._sources:
                raise RefusedError(HTTPStatus.NOT_FOUND, self._no_source(source))
            tables = _tables(await request.read())
            self._request_snapshot(source, tables)
        except IngestdError as error:
            body = {"error": error.what, "remedy": error.remedy}
            return self._json(_code(error), body)
        return self._json(
            HTTPStatus.ACCEPTED, {"source": source, "tables": [str(t) for t in tables]}
        )

    def _no_source(self, source: str) -> str:
        return f"sources.{source}: no such source; there is {', '.join(sorted(self._sources))}"

    def _json(self, code: HTTPStatus, body: object) -> web.Response:
        text = json.dumps(self._redactor.tree(body))
        return web.Response(status=code, text=text + "\n", content_type=_JSON)


def is_loopback(host: str) -> bool:
    """Say whether a host name or address is this machine's own for itself."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_of(header: str) -> str:
    """Give the host in a Host header, without its port (RFC 9110, section 7.2)."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]


def _refuse_unless_local(request: web.Request, listening: Sequence[str]) -> None:
    wide = [host for host in listening if not is_loopback(host)]
    if wide or not listening:
        raise RefusedError(
            HTTPStatus.FORBIDDEN,
            f"commands are taken on loopback only, and http.listen is on {', '.join(wide)}",
            remedy='set listen = "127.0.0.1:9464" in [http] and start the daemon anew',
        )
    if not is_loopback(host_of(request.headers.get("Host", ""))):
        raise RefusedError(
            HTTPStatus.FORBIDDEN,
            "commands are taken from this machine only, and the Host header names another",
            remedy="send it to 127.0.0.1, as `ingestd snapshot` does",
        )
    if request.content_type != _JSON:
        raise RefusedError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "the body is not declared as JSON",
            remedy=f"send Content-Type: {_JSON}",
        )


def _tables(body: bytes) -> list[TableId]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    names = document.get("tables") if isinstance(document, dict) and len(document) == 1 else None
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"the body is not JSON like {_SHAPE}")
    try:
        return [TableId.parse(name) for name in dict.fromkeys(names)]
    except ValueError as error:
        raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error


def _code(error: IngestdError) -> HTTPStatus:
    if isinstance(error, RefusedError):
        return error.code
    transient = isinstance(error, TransientError)
    return HTTPStatus.CONFLICT if transient else HTTPStatus.UNPROCESSABLE_ENTITY

"""The requests that change something: they need a token, and web pages can't send them."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from ingestd.http.auth import has_token
from ingestd.http.command_token import OFF_REMEDY
from ingestd.model.errors import IngestdError, TransientError
from ingestd.model.printable_text import printable
from ingestd.model.schema import TableId

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from ingestd.config.redaction import Redactor
    from ingestd.http.command_token import CommandToken

_JSON = "application/json"
_TABLES = '{"tables": ["public.orders"]}'
_MAX_SHOWN = 1000
_MAY_HAVE_WHERE = ', with or without "where": "id < 1000"'


class SnapshotControl(Protocol):
    """Carries out snapshot commands. Raises OperatorError, or TransientError to retry later."""

    def request_snapshot(
        self, source: str, tables: Sequence[TableId], where: str | None = None
    ) -> None:
        """Request a snapshot of tables of a source, or of the rows that match `where` (SQL)."""
        ...

    def cancel_snapshot(self, source: str, tables: Sequence[TableId]) -> None:
        """Cancel the snapshots of these tables, requested or running."""
        ...


class RefusedError(IngestdError):
    """A request that is refused with the HTTP status `code`."""

    def __init__(self, code: HTTPStatus, what: str, *, remedy: str | None = None) -> None:
        super().__init__(what, remedy=remedy)
        self.code = code


class SourceCommands:
    """Authorization and responses common to all commands about a source.

    Responses are JSON: what was done, and ``source``; else ``{"error": ..., "remedy": ...}`` with
    400 (malformed body), 401 (no token, or another one), 403 (`ingestd.http.auth`, or a generated
    token from another machine), 404 (no such source), 409 (not now), 415 (not sent as JSON), 422
    (refused), 503 (commands are off). Browsers send application/json to another site only if that
    site allows it, which this one never does. `token`: the generated token that requests need;
    None: `ingestd.http.auth` has checked the one in the config.
    """

    def __init__(
        self, sources: Collection[str], redactor: Redactor, token: CommandToken | None = None
    ) -> None:
        self._token = token
        self._sources = sources
        self._redactor = redactor

    async def answer(
        self,
        request: web.Request,
        act: Callable[[str, bytes], Awaitable[dict[str, Any]]],
        done: HTTPStatus,
    ) -> web.Response:
        """Carry out a request if it is allowed, and return the response.

        `act`: carries it out, given source and body. `done`: the HTTP status of success.
        """
        source = request.match_info["source"]
        try:
            if self._token is not None:
                await _refuse_without_token(request, self._token)
            _refuse_unless_declared(request)
            if source not in self._sources:
                raise RefusedError(HTTPStatus.NOT_FOUND, self._no_source(source))
            answer = await act(source, await request.read())
        except IngestdError as error:
            body = {"error": error.what, "remedy": error.remedy}
            return self._json(_code(error), body, error)
        return self._json(done, {"source": source, **answer})

    def _no_source(self, source: str) -> str:
        return f"sources.{source}: no such source; there is {', '.join(sorted(self._sources))}"

    def _json(
        self, code: HTTPStatus, body: object, error: IngestdError | None = None
    ) -> web.Response:
        text = json.dumps(self._redactor.tree(body))
        is_about_token = error is not None and code == HTTPStatus.UNAUTHORIZED
        headers = {"WWW-Authenticate": "Bearer"} if is_about_token else {}
        return web.Response(status=code, text=text + "\n", content_type=_JSON, headers=headers)


class SnapshotCommands(SourceCommands):
    """``/sources/{source}/snapshot``: POST requests a snapshot of tables, DELETE cancels it.

    The body is JSON: ``{"tables": ["public.orders"]}``. For POST, an optional ``"where"`` limits
    the snapshot to the rows that match an SQL condition. The response repeats the body and adds
    ``source``: 202 for POST, 200 for DELETE. Errors, besides those of `SourceCommands`: 409 (the
    source is not running), 422 (no such table, no snapshot of it, the source is paused).
    """

    def __init__(
        self,
        control: SnapshotControl,
        sources: Collection[str],
        redactor: Redactor,
        token: CommandToken | None = None,
    ) -> None:
        super().__init__(sources, redactor, token)
        self._control = control

    async def request(self, request: web.Request) -> web.Response:
        """Answer a POST."""

        async def act(source: str, body: bytes) -> dict[str, Any]:
            asked = _asked(body, may_have_where=True)
            self._control.request_snapshot(source, asked.tables, asked.where)
            return asked.to_json()

        return await self.answer(request, act, HTTPStatus.ACCEPTED)

    async def cancel(self, request: web.Request) -> web.Response:
        """Answer a DELETE."""

        async def act(source: str, body: bytes) -> dict[str, Any]:
            asked = _asked(body, may_have_where=False)
            self._control.cancel_snapshot(source, asked.tables)
            return asked.to_json()

        return await self.answer(request, act, HTTPStatus.OK)


async def _refuse_without_token(request: web.Request, token: CommandToken) -> None:
    """Refuse a request without the generated token; the remedy is a request that would work."""
    if token.off is not None:
        raise RefusedError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"commands are off: {token.off}",
            remedy=OFF_REMEDY,
        )
    if not token.is_from_here(request):
        raise RefusedError(
            HTTPStatus.FORBIDDEN,
            "without `token` in [http] commands are accepted from the daemon's own machine only",
            remedy="set `token` in [http] and restart the daemon",
        )
    value = token.value()
    if value is None or not has_token(request, value):
        raise RefusedError(
            HTTPStatus.UNAUTHORIZED,
            f"commands need the token in {printable(str(token.path))}",
            remedy=f"run `ingestd {_command_of(request)}` as the daemon's user or root, or: "
            f"{await _as_curl(request, str(token.path))}",
        )


def _command_of(request: web.Request) -> str:
    """Return the name of the command that sends such a request."""
    what = request.path.rpartition("/")[2]
    return "resume" if what == "pause" and request.method == "DELETE" else what


async def _as_curl(request: web.Request, path: str) -> str:
    """Return the request as a curl command that reads the token from its file."""
    try:
        body = json.dumps(json.loads(await request.read()))
    except (ValueError, RecursionError):
        body = ""
    if not body or len(body) > _MAX_SHOWN:
        body = _TABLES if request.path.endswith("/snapshot") else "{}"
    token = f'"Authorization: Bearer $(cat {shlex.quote(path)})"'
    tls = " --cacert TLS_CERT" if request.secure else ""
    url = shlex.quote(f"{request.scheme}://{request.host}{request.raw_path}")
    return (
        f"curl{tls} -X {request.method} -H {token} -H 'Content-Type: {_JSON}' "
        f"-d {shlex.quote(body)} {url}"
    )


def _refuse_unless_declared(request: web.Request) -> None:
    if request.content_type != _JSON:
        raise RefusedError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "the body is not declared as JSON",
            remedy=f"send Content-Type: {_JSON}",
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """The parsed body of a snapshot request."""

    tables: Sequence[TableId]
    where: str | None

    def to_json(self) -> dict[str, Any]:
        where = {} if self.where is None else {"where": self.where}
        return {"tables": [str(t) for t in self.tables], **where}


def _asked(body: bytes, *, may_have_where: bool) -> _Asked:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    keys = {"tables", "where"} if may_have_where else {"tables"}
    known = document if isinstance(document, dict) and document.keys() <= keys else {}
    names, where = known.get("tables"), known.get("where")
    are_names = isinstance(names, list) and names and all(isinstance(n, str) for n in names)
    is_condition = isinstance(where, str) and where.strip() and "\0" not in where
    if not are_names or not (where is None or is_condition):
        shape = _TABLES + (_MAY_HAVE_WHERE if may_have_where else "")
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"the body is not JSON like {shape}")
    assert isinstance(names, list)
    try:
        return _Asked([TableId.parse(name) for name in dict.fromkeys(names)], where)
    except ValueError as error:
        raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error


def _code(error: IngestdError) -> HTTPStatus:
    if isinstance(error, RefusedError):
        return error.code
    transient = isinstance(error, TransientError)
    return HTTPStatus.CONFLICT if transient else HTTPStatus.UNPROCESSABLE_ENTITY

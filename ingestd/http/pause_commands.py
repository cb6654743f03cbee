"""The requests that pause a source and have it go on: protected as all commands are."""

from __future__ import annotations

import json
from datetime import UTC
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from ingestd.http.commands import RefusedError, SourceCommands

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import datetime

    from aiohttp import web

    from ingestd.config.redaction import Redactor
    from ingestd.http.command_token import CommandToken


class PauseControl(Protocol):
    """Who acts on the commands. Raises OperatorError, TransientError if the lake can't be written.

    Both are idempotent, and hold for good when they return.
    """

    async def pause(self, source: str) -> datetime:
        """Have a source deliver nothing until it is resumed: gives since when."""
        ...

    async def resume(self, source: str) -> bool:
        """Have a source go on where it was; False if it was not paused."""
        ...


class PauseCommands(SourceCommands):
    """``/sources/{source}/pause``: POST pauses, DELETE resumes; the body is ``{}``.

    The answer to POST, 202, has ``since`` (ISO 8601): /status says when nothing is delivered any
    more. That to DELETE, 200, has ``was_paused``.
    """

    def __init__(
        self,
        control: PauseControl,
        sources: Collection[str],
        redactor: Redactor,
        token: CommandToken | None = None,
    ) -> None:
        super().__init__(sources, redactor, token)
        self._control = control

    async def pause(self, request: web.Request) -> web.Response:
        """Answer a POST."""

        async def act(source: str, body: bytes) -> dict[str, Any]:
            _refuse_unless_empty(body)
            since = await self._control.pause(source)
            return {"since": since.astimezone(UTC).isoformat(timespec="milliseconds")}

        return await self.answer(request, act, HTTPStatus.ACCEPTED)

    async def resume(self, request: web.Request) -> web.Response:
        """Answer a DELETE."""

        async def act(source: str, body: bytes) -> dict[str, Any]:
            _refuse_unless_empty(body)
            return {"was_paused": await self._control.resume(source)}

        return await self.answer(request, act, HTTPStatus.OK)


def _refuse_unless_empty(body: bytes) -> None:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if document != {}:
        raise RefusedError(HTTPStatus.BAD_REQUEST, "the body is not JSON like {}")

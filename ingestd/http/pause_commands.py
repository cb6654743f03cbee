"""The requests that pause and resume a source; they need a token, as all commands do."""

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
    """Pauses and resumes. Raises OperatorError or TransientError if the lake can't be written.

    Both methods are idempotent and durable when they return.
    """

    async def pause(self, source: str) -> datetime:
        """Pause a source until it is resumed; return since when it is paused."""
        ...

    async def resume(self, source: str) -> bool:
        """Resume a source where it stopped; return False if it was not paused."""
        ...


class PauseCommands(SourceCommands):
    """``/sources/{source}/pause``: POST pauses, DELETE resumes; the body is ``{}``.

    The response to POST is 202 with ``since`` (ISO 8601); deliveries may still be finishing, and
    /status shows when they have ended. The response to DELETE is 200 with ``was_paused``.
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

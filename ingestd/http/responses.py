"""What every answer over HTTP carries, also those that aiohttp gives before it asks us."""

from __future__ import annotations

from aiohttp import web

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "ingestd",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def add_headers(response: web.StreamResponse) -> None:
    """Add `HEADERS`, but for those that the answer has of its own."""
    for name, value in HEADERS.items():
        if name == "Server" or name not in response.headers:  # aiohttp names itself there
            response.headers[name] = value


class RequestHandler(web.RequestHandler):
    """Aiohttp's end of a connection: its answer to what is no request has our headers too.

    The application's signals are not asked then: there is nothing that could be looked up.
    """

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what can't be read, or what a handler failed at."""
        response = super().handle_error(request, status, exc, message)
        add_headers(response)
        return response

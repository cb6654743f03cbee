"""The headers of every HTTP response, including those that aiohttp generates itself."""

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
    """Add `HEADERS`, except those that the response already sets."""
    for name, value in HEADERS.items():
        if name == "Server" or name not in response.headers:  # aiohttp sets Server to its name
            response.headers[name] = value


class RequestHandler(web.RequestHandler):
    """Aiohttp's protocol, with our headers in its responses to malformed requests as well.

    No route is resolved for those, so the application's signals don't run.
    """

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Respond to a malformed request, or to one whose handler failed."""
        response = super().handle_error(request, status, exc, message)
        add_headers(response)
        return response

"""Read access over HTTP: for clients with the token or, if none is set, for this machine.

Commands always need a token (`ingestd.http.command_token`).

Three paths are open to every client. /healthz reveals nothing, and probes have no secrets. The
page's files are open because the page asks for the token. So is the proof that the server knows the
token (`ingestd.http.token_proof`).

Without a token, a server that listens on loopback accepts only requests whose Host header names
loopback: this stops DNS rebinding, where a web page points its own name at 127.0.0.1. Requests from
pages of other origins are refused by `Origin` or, for images and scripts, which browsers request
without it, by `Sec-Fetch-Site`. A browser that sends neither receives an answer but keeps it from
the page (`Cross-Origin-Resource-Policy`). Links from other sites work. The status page itself sends
only GET requests, for which browsers send no Origin, except for its own modules.
"""

from __future__ import annotations

import hmac
import json
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import web

from ingestd.config.units import is_loopback
from ingestd.http.command_token import OFF_REMEDY, why_off
from ingestd.http.page_files import PAGE_PATHS
from ingestd.http.token_proof import PATH as PROOF_PATH
from ingestd.model.check import CheckLine
from ingestd.model.errors import OperatorError

if TYPE_CHECKING:
    from ingestd.config import HttpSettings
    from ingestd.config.units import Address

OPEN_PATHS = frozenset({"/healthz"})
_OTHER_PAGES = {"cross-site", "same-site"}
"""`Sec-Fetch-Site` of requests from pages of other origins (W3C, Fetch Metadata)."""

_SCHEME = "bearer "

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Protection:
    """`token`: required in requests; None: not required. `tls`: its context; None: plain HTTP."""

    token: str | None = None
    tls: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        return f"Protection(token={self.token is not None}, tls={self.tls is not None})"

    def refusal(self, request: web.Request, listening: Sequence[str]) -> web.Response | None:
        """Return the response that refuses a request; None if it may be served.

        `listening`: the hosts on which the server listens.
        """
        if request.path in OPEN_PATHS:
            return None
        is_page = request.path in PAGE_PATHS
        if self.token is not None:
            is_open = is_page or request.path == PROOF_PATH
            return None if is_open or has_token(request, self.token) else _unauthorized()
        if not is_page and ("Origin" in request.headers or _is_of_other_page(request)):
            return _forbidden("requests from web pages are refused", "use a program such as curl")
        is_narrow = listening and all(map(is_loopback, listening))
        if is_narrow and not is_loopback(host_of(request.headers.get("Host", ""))):
            return _forbidden(
                "only this machine may connect, but the Host header names another",
                "send the request to 127.0.0.1, or set `token` in [http]",
            )
        return None


OPEN = Protection()


def has_token(request: web.Request, token: str) -> bool:
    """Return whether the Authorization header (RFC 6750) has the token; in constant time."""
    header = request.headers.get("Authorization", "")
    given = header[len(_SCHEME) :].strip() if header.lower().startswith(_SCHEME) else ""
    # aiohttp keeps bytes that are not UTF-8 as lone surrogates
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())


def protection_of(settings: HttpSettings) -> Protection:
    """Load the token and certificate of `[http]`. Raises OperatorError for an unusable one."""
    token = None if settings.token is None else settings.token.get_secret_value()
    if settings.tls_cert is None or settings.tls_key is None:
        return Protection(token)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password=_no_password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise OperatorError(
            f"http.tls_cert {settings.tls_cert} and http.tls_key {settings.tls_key} can't be used: "
            f"{why}",
            remedy="give two PEM files, the certificate (with any intermediate CAs) and its key, "
            "readable by this account and not encrypted",
        ) from error
    return Protection(token, context)


def _no_password() -> str:
    """Keep OpenSSL from prompting for a password on the terminal."""
    msg = "the key is encrypted"
    raise ValueError(msg)


def openness(listen: Address, protection: Protection) -> str | None:
    """Return how a server at this address is exposed to other machines; None if it is not."""
    if is_loopback(listen.host):
        return None
    if protection.token is None:
        return "no token is set: any client that reaches this address can read status and metrics"
    if protection.tls is None:
        return "no tls_cert is set: the token can be read on the network"
    return None


OPENNESS_REMEDY = (
    'listen = "127.0.0.1:9464" in [http], or token = "env:..." with tls_cert and tls_key'
)


def check_http(settings: HttpSettings, environ: Mapping[str, str]) -> CheckLine | None:
    """Return the line of `check` about `[http]`; None if there is nothing to report."""
    if settings.listen is None:
        return None
    try:
        protection = protection_of(settings)
    except OperatorError as error:
        return CheckLine("", "http", "fail", error.what, error.remedy)
    why = openness(settings.listen, protection)
    if why is not None:
        return CheckLine("", "http", "warn", f"{settings.listen}: {why}", OPENNESS_REMEDY)
    if protection.token is None and (why := why_off(environ)) is not None:
        return CheckLine("", "http", "warn", f"commands would be off: {why}", OFF_REMEDY)
    return None


def host_of(header: str) -> str:
    """Return the host in a Host header, without its port (RFC 9110, section 7.2)."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]


def _is_of_other_page(request: web.Request) -> bool:
    """Return whether a page of another origin sent this request; links followed don't count."""
    site, mode = (request.headers.get(f"Sec-Fetch-{x}", "") for x in ("Site", "Mode"))
    return site in _OTHER_PAGES and mode != "navigate"


def _unauthorized() -> web.Response:
    return _answer(
        HTTPStatus.UNAUTHORIZED,
        "a token is required",
        "send Authorization: Bearer with the `token` of [http]",
        {"WWW-Authenticate": "Bearer"},
    )


def _forbidden(what: str, remedy: str) -> web.Response:
    return _answer(HTTPStatus.FORBIDDEN, what, remedy, {})


def _answer(code: HTTPStatus, what: str, remedy: str, headers: dict[str, str]) -> web.Response:
    text = json.dumps({"error": what, "remedy": remedy}) + "\n"
    return web.Response(status=code, text=text, content_type="application/json", headers=headers)

"""Who may read over HTTP: clients with the token or, without one, all that are on this machine.

Commands need a token in any case (`ingestd.http.command_token`).

/healthz is for everybody: it tells nothing, and probes have no secrets. So are the page's files
where there is a token, which the page then asks for, and the proof that the server knows it
(`ingestd.http.token_proof`). Without a token, a server that listens on
loopback takes requests for loopback only: a name that a web page bound to it again names another
Host. What pages of other origins ask for is refused (by `Origin` and, for images and scripts, which
browsers ask for without one, `Sec-Fetch-Site`); a browser that sends neither is answered, but keeps
the answer from the page (`Cross-Origin-Resource-Policy`). A link may lead a person here. Our page
asks by GET alone, with which browsers send no Origin, but for its own modules.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import web

from ingestd.config.units import is_loopback
from ingestd.http.command_token import OFF_REMEDY, is_given, why_off
from ingestd.http.page_files import PAGE_PATHS
from ingestd.http.token_proof import PATH as PROOF_PATH
from ingestd.model.check import CheckLine
from ingestd.model.errors import OperatorError

if TYPE_CHECKING:
    from ingestd.config import HttpSettings
    from ingestd.config.units import Address

OPEN_PATHS = frozenset({"/healthz"})
_OTHER_PAGES = {"cross-site", "same-site"}
"""What browsers say of requests that pages of other origins make (W3C, Fetch Metadata)."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Protection:
    """`token`: what requests have to bring; None: nothing. `tls`: what connections begin with."""

    token: str | None = None
    tls: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        return f"Protection(token={self.token is not None}, tls={self.tls is not None})"

    def refusal(self, request: web.Request, listening: Sequence[str]) -> web.Response | None:
        """Answer a request that may not be served; None if it may.

        `listening`: the hosts that the server listens on.
        """
        if request.path in OPEN_PATHS:
            return None
        is_page = request.path in PAGE_PATHS
        if self.token is not None:
            is_open = is_page or request.path == PROOF_PATH
            return None if is_open or is_given(request, self.token) else _unauthorized()
        if not is_page and ("Origin" in request.headers or _is_of_other_page(request)):
            return _forbidden("requests of web pages are not answered", "ask with a program")
        is_narrow = listening and all(map(is_loopback, listening))
        if is_narrow and not is_loopback(host_of(request.headers.get("Host", ""))):
            return _forbidden(
                "it is for this machine only, and the Host header names another",
                "send it to 127.0.0.1, or set `token` in [http]",
            )
        return None


OPEN = Protection()


def protection_of(settings: HttpSettings) -> Protection:
    """Read what `[http]` names. Raises OperatorError for a certificate that can't be used."""
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
            remedy="give two PEM files, the certificate (with those of CAs between) and its key, "
            "readable by this account and not encrypted",
        ) from error
    return Protection(token, context)


def _no_password() -> str:
    """Keep OpenSSL from asking for one on the terminal."""
    msg = "the key is encrypted"
    raise ValueError(msg)


def openness(listen: Address, protection: Protection) -> str | None:
    """Say what others can do to a server that listens there; None if nothing."""
    if is_loopback(listen.host):
        return None
    if protection.token is None:
        return "whoever reaches this address can read status and metrics: there is no token"
    if protection.tls is None:
        return "whoever is between can read the token: there is no tls_cert"
    return None


OPENNESS_REMEDY = (
    'listen = "127.0.0.1:9464" in [http], or token = "env:..." with tls_cert and tls_key'
)


def check_http(settings: HttpSettings, environ: Mapping[str, str]) -> CheckLine | None:
    """Return the line of `check` about `[http]`; None if there is nothing to say."""
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
    """Return whether a page makes it for itself; one that leads a person here reads nothing."""
    site, mode = (request.headers.get(f"Sec-Fetch-{x}", "") for x in ("Site", "Mode"))
    return site in _OTHER_PAGES and mode != "navigate"


def _unauthorized() -> web.Response:
    return _answer(
        HTTPStatus.UNAUTHORIZED,
        "a token is needed",
        "send Authorization: Bearer with the `token` of [http]",
        {"WWW-Authenticate": "Bearer"},
    )


def _forbidden(what: str, remedy: str) -> web.Response:
    return _answer(HTTPStatus.FORBIDDEN, what, remedy, {})


def _answer(code: HTTPStatus, what: str, remedy: str, headers: dict[str, str]) -> web.Response:
    text = json.dumps({"error": what, "remedy": remedy}) + "\n"
    return web.Response(status=code, text=text, content_type="application/json", headers=headers)

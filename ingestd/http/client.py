"""Client of a running daemon: status, snapshots and their cancellation, pause and resume."""

from __future__ import annotations

import http.client
import json
import re
import ssl
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from ingestd.config.units import Address, is_loopback
from ingestd.http.command_token import OFF_REMEDY, is_same_machine, read_token
from ingestd.http.token_proof import PARAMETER, key_of, new_challenge, written_address
from ingestd.http.token_proof import PATH as PROOF_PATH
from ingestd.model.errors import ConfigError, OperatorError, TransientError
from ingestd.model.printable_text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingestd.config import HttpSettings

_LIMIT_S = 2.0
_MARK_LIMIT_S = 20.0
"""Timeout of commands for which the daemon writes to the lake before it responds."""
_PORTS = {"http": 80, "https": 443}
_FIRST = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)
"""The first certificate in a file, the server's own (RFC 8446, section 4.4.2)."""
_PROOF_BYTES = 4096
"""Larger than any response to a challenge."""
RESPONSE_LIMIT_BYTES = 64 << 20
"""Larger than the status of 10,000 tables. The rest of a longer response is not read."""
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not listened on here


_OF_COMMANDS = "commands need"
"""How a refusal begins where only commands need a token; such a refusal has its own remedy."""


@dataclass(frozen=True, slots=True)
class Endpoint(Address):
    """The address of a daemon, with the credentials to connect to it.

    `token`: from `[http]`, None if not set. `tls`: verifies the daemon; None for plain HTTP.
    """

    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return str(Address(self.host, self.port))

    @property
    def url(self) -> str:
        """The address as a URL."""
        return f"{'http' if self.tls is None else 'https'}://{self}"


def endpoint_of(url: str, token: str | None = None) -> Endpoint:
    """Parse an http or https URL; the port defaults to 80 or 443. Raises ValueError.

    With https, the daemon is verified as web sites are: by a CA of the system and the host name.
    Over plain HTTP a token is sent to this machine only.
    """
    found = urlsplit(url)
    if found.scheme not in _PORTS or not found.hostname or found.path not in {"", "/"}:
        msg = "not a daemon's address; write it like 'http://127.0.0.1:9464'"
        raise ValueError(msg)
    if token is not None and found.scheme == "http" and not is_loopback(found.hostname):
        msg = (
            "the token would cross the network unencrypted; use https://, or connect to "
            "http://127.0.0.1 on that machine or through a tunnel"
        )
        raise ValueError(msg)
    port = _PORTS[found.scheme] if found.port is None else found.port
    tls = ssl.create_default_context() if found.scheme == "https" else None
    return Endpoint(found.hostname, port, token, tls)


def endpoint_in(settings: HttpSettings) -> Endpoint | None:
    """Return the endpoint of a config's daemon; None if HTTP is off. Raises OperatorError.

    With TLS, the daemon must present exactly the configured certificate: the host name and the CA
    are not checked.
    """
    if settings.listen is None:
        return None
    token = None if settings.token is None else settings.token.get_secret_value()
    tls = None if settings.tls_cert is None else _known_by(Path(settings.tls_cert))
    return Endpoint(settings.listen.host, settings.listen.port, token, tls)


def _known_by(certificate: Path) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cadata=_first_in(certificate.read_text("ascii")))
    except (OSError, ValueError) as error:
        raise OperatorError(
            f"http.tls_cert {certificate} can't be read: {error}",
            remedy="name the PEM file of the daemon's certificate, and make it readable by this "
            "account",
        ) from error
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _first_in(pem: str) -> str:
    found = _FIRST.search(pem)
    if found is None:  # with an empty string, ssl would trust the CAs of the system
        msg = "it contains no certificate"
        raise ValueError(msg)
    return found[0]


class UnprovenError(OperatorError):
    """The server at an address did not prove that it knows the daemon's token."""


def fetch_status(
    listen: Address, *, limit_bytes: int = RESPONSE_LIMIT_BYTES
) -> dict[str, Any] | None:
    """Return /status of the daemon at `listen`; None if no daemon answers there.

    Raises OperatorError if it rejects the token of `listen` (an `Endpoint`) or presents another
    certificate. Raises UnprovenError, and sends no token, if it does not know the token.
    """
    connection = _connection(listen)
    try:
        _require_proof(connection, listen)
        connection.request("GET", "/status", headers=_credentials(listen))
        response = connection.getresponse()
        if response.status == HTTPStatus.UNAUTHORIZED and response.headers["Server"] == "ingestd":
            raise _unauthorized(listen)
        if response.status != http.client.OK:
            return None
        found = _parsed(response.read(limit_bytes))
    except ssl.SSLCertVerificationError as error:
        raise _unknown(listen) from error
    except (OSError, http.client.HTTPException, ValueError):
        return None  # no daemon, or another server: the caller tries other sources
    finally:
        connection.close()
    is_ours = isinstance(found, dict) and isinstance(found.get("sources"), dict)
    return found if is_ours else None


def request_snapshot(
    listen: Address, source: str, tables: Sequence[str], where: str | None = None
) -> None:
    """Ask the daemon at `listen` to re-snapshot tables of a source.

    `where`: an SQL condition that limits the snapshot to matching rows.
    Raises ConfigError for an unknown source, OperatorError for an unknown table or if the daemon
    accepts no commands, TransientError while the source is not running or on a timeout.
    """
    asked: dict[str, object] = {"tables": list(tables)}
    if where is not None:
        asked["where"] = where
    _command(listen, "POST", source, "snapshot", asked, HTTPStatus.ACCEPTED)


def cancel_snapshot(listen: Address, source: str, tables: Sequence[str]) -> None:
    """Ask the daemon at `listen` to cancel snapshots of tables of a source.

    Raises as `request_snapshot`, and OperatorError for a table without a snapshot.
    """
    _command(listen, "DELETE", source, "snapshot", {"tables": list(tables)}, HTTPStatus.OK)


def request_pause(listen: Address, source: str) -> datetime:
    """Ask the daemon at `listen` to pause a source; return since when it is paused.

    Raises ConfigError for an unknown source, OperatorError if the daemon accepts no commands or
    can't write the lake, TransientError for a temporary failure or on a timeout.
    """
    answer = _command(listen, "POST", source, "pause", {}, HTTPStatus.ACCEPTED, _MARK_LIMIT_S)
    return datetime.fromisoformat(answer["since"])


def request_resume(listen: Address, source: str) -> bool:
    """Ask the daemon at `listen` to resume a source; return False if it was not paused.

    Raises as `request_pause`.
    """
    answer = _command(listen, "DELETE", source, "pause", {}, HTTPStatus.OK, _MARK_LIMIT_S)
    return bool(answer["was_paused"])


def _command(  # noqa: PLR0917 - of one request
    listen: Address,
    method: str,
    source: str,
    what: str,
    asked: dict[str, object],
    done: HTTPStatus,
    limit_s: float = _LIMIT_S,
) -> dict[str, Any]:
    listen = _with_token(listen)
    connection = _connection(listen, limit_s)
    try:
        _require_proof(connection, listen)
        if not (_is_verified(listen) or _credentials(listen)):
            raise _no_daemon(listen)
        connection.request(
            method,
            f"/sources/{quote(source, safe='')}/{what}",
            json.dumps(asked),
            {"Content-Type": "application/json", **_credentials(listen)},
        )
        response = connection.getresponse()
        code, body = response.status, response.read(RESPONSE_LIMIT_BYTES)
    except ssl.SSLCertVerificationError as error:
        raise _unknown(listen) from error
    except (OSError, http.client.HTTPException) as error:
        raise TransientError(
            f"no response from the daemon on {listen}: {error or type(error).__name__}",
            reason="no_answer",
            remedy="check with `ingestd status` that it is running, and retry",
        ) from error
    finally:
        connection.close()
    if code != done:
        raise _refusal(listen, code, body)
    found = _parsed(body)
    if not isinstance(found, dict):
        raise OperatorError(
            f"the server on {listen} does not respond as ingestd does",
            remedy="check with `ss -ltnp` which process listens there",
        )
    return found


def _parsed(body: bytes) -> Any:  # noqa: ANN401
    """Return the parsed JSON of a response; None if it is not JSON: any server may have sent it."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _with_token(listen: Address) -> Address:
    """Return the address with the token that the daemon generated, if it generated one.

    Raises OperatorError if the daemon accepts no commands, or its token can't be read here.
    """
    if isinstance(listen, Endpoint) and listen.token is not None:
        return listen
    commands = (fetch_status(listen) or {}).get("commands")
    if not isinstance(commands, dict):
        return listen  # no daemon, or an older version
    if commands.get("off") is not None:
        raise OperatorError(
            f"the daemon on {listen} accepts no commands: {printable(str(commands['off']))}",
            remedy=OFF_REMEDY,
        )
    if commands.get("token_file") is None:
        return listen
    if not _is_on_this_machine(listen):
        raise OperatorError(
            f"the daemon on {listen} accepts commands from its own machine only, as it has no "
            "`token` in [http]",
            remedy="run the command there, or set `token` in [http] and restart the daemon",
        )
    tls = listen.tls if isinstance(listen, Endpoint) else None
    return Endpoint(listen.host, listen.port, read_token(commands, listen.port), tls)


def _require_proof(connection: http.client.HTTPConnection, listen: Address) -> None:
    """Require the server to prove that it knows the token, if the token would go over plain HTTP.

    `connection` never reconnects afterwards, so that requests reach only the server that gave the
    proof. Raises UnprovenError, OSError, HTTPException.
    """
    token = listen.token if isinstance(listen, Endpoint) else None
    connection.connect()
    connection.auto_open = 0
    if token is None or _is_verified(listen):
        return
    challenge, here = new_challenge(), written_address(connection.sock.getpeername())
    connection.request("GET", f"{PROOF_PATH}?{PARAMETER}={challenge}")
    response = connection.getresponse()
    body = response.read(_PROOF_BYTES)
    found = _parsed(body) if response.isclosed() else None
    answer = found if isinstance(found, dict) else {}
    address, proof = (str(answer.get(name)) for name in ("address", "proof"))
    if not key_of(token).is_proven(challenge, address, proof):
        raise UnprovenError(
            f"the server on {listen} is not this daemon: it did not prove that it knows the "
            "token, so the token was not sent",
            remedy="check with `ss -ltnp` which process listens there; if it is the daemon, give "
            "the config that it was started with, or set INGESTD_HTTP_TOKEN for --url, or restart "
            "it if it is an older version",
        )
    if address != here:
        raise UnprovenError(
            f"the server on {listen} is not this daemon: it forwards to the one on port "
            f"{address.partition(' ')[2]} of {address.partition(' ')[0]}, and could keep the token",
            remedy="run the command where the daemon runs (docker exec, kubectl exec, ssh), or use "
            "the daemon's own address; through a forwarded port, use https or curl",
        )


def _is_verified(listen: Address) -> bool:
    """Return whether TLS verifies the server."""
    return isinstance(listen, Endpoint) and listen.tls is not None


def _is_on_this_machine(listen: Address) -> bool:
    """Return whether the server runs on this machine; only then is a token file it names read."""
    connection = _connection(Address(listen.host, listen.port))
    try:
        connection.connect()
        peer, own = connection.sock.getpeername()[0], connection.sock.getsockname()[0]
    except OSError:
        return False
    finally:
        connection.close()
    return is_same_machine(peer, own)


def _refusal(
    listen: Address, code: int, body: bytes
) -> ConfigError | OperatorError | TransientError:
    document = _parsed(body)
    if not (isinstance(document, dict) and isinstance(document.get("error"), str)):
        return OperatorError(
            f"the server on {listen} knows no such command (HTTP status {code})",
            remedy="it may be an older ingestd: restart the daemon with the installed version",
        )
    what, remedy = document["error"], document.get("remedy")
    if code == HTTPStatus.UNAUTHORIZED and not what.startswith(_OF_COMMANDS):
        return _unauthorized(listen)
    if code == HTTPStatus.NOT_FOUND:
        return ConfigError(what, remedy=remedy)
    if code == HTTPStatus.CONFLICT:
        return TransientError(what, reason="not_running", remedy=remedy)
    return OperatorError(what, remedy=remedy)


def _no_daemon(listen: Address) -> OperatorError:
    return OperatorError(
        f"the server on {listen} knows no such command: its /status names no token file",
        remedy="check with `ss -ltnp` which process listens there; if it is an older ingestd, "
        "restart the daemon with the installed version",
    )


def _unauthorized(listen: Address) -> OperatorError:
    return OperatorError(
        f"the daemon on {listen} rejects the token",
        remedy="give the config that it was started with, or set INGESTD_HTTP_TOKEN for --url",
    )


def _unknown(listen: Address) -> OperatorError:
    return OperatorError(
        f"the server on {listen} presents a certificate that is not the daemon's",
        remedy="if http.tls_cert was replaced, restart the daemon",
    )


def _credentials(listen: Address) -> dict[str, str]:
    token = listen.token if isinstance(listen, Endpoint) else None
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _connection(listen: Address, limit_s: float = _LIMIT_S) -> http.client.HTTPConnection:
    host = _EVERYWHERE.get(listen.host, listen.host)
    tls = listen.tls if isinstance(listen, Endpoint) else None
    if tls is not None:
        return http.client.HTTPSConnection(host, listen.port, timeout=limit_s, context=tls)
    return http.client.HTTPConnection(host, listen.port, timeout=limit_s)

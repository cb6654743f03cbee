"""Encryption of a connection, and verification of its server: which mode is required.

`transport/channels/tls.py` reads and writes the encrypted bytes.

Connections to other machines need both (``verify-full``), unless a weaker mode is set explicitly in
any place that libpq reads: the DSN, a service file or the environment. libpq's own default,
``prefer``, does not count: with it, anyone on the network path can read password hashes and rows.

Source: PostgreSQL documentation, "SSL Support", "Protection Provided in Different Modes".
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psycopg import pq
from psycopg.conninfo import make_conninfo

from ingestd.config.units import is_loopback
from ingestd.model.check import CheckLine

VERIFIED = "verify-full"
_LIBPQ_DEFAULT = "prefer"
_FIRST_WITH_SYSTEM_ROOTS = 160000
_OWN_ROOTS = "~/.postgresql/root.crt"
"""libpq's own default, if it exists."""
BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine, Arch
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # Fedora, RHEL
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # macOS, BSD
)
"""Where systems keep their trusted CAs."""
_NO_PORT = "0"
"""Refused before a name is resolved or a connection is attempted."""


@dataclass(frozen=True, slots=True)
class Transport:
    """What libpq would do. `host`: as given, all if several; empty for its default, a socket.

    `mode`: sslmode, None if not set. `has_roots`: CAs are configured, or libpq finds some.
    """

    host: str
    is_local: bool
    mode: str | None
    has_roots: bool

    @property
    def is_weak(self) -> bool:
        """Return whether a mode weaker than verify-full is explicitly set for another machine."""
        return not self.is_local and self.mode not in {None, VERIFIED}


def resolved(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return how libpq resolves a DSN's parameters, except the port. Does not connect."""
    dsn_without_port = make_conninfo(**{**parameters, "port": _NO_PORT})
    resolving = pq.PGconn.connect_start(dsn_without_port.encode())
    try:
        return {
            option.keyword.decode(): option.val.decode(errors="replace")
            for option in resolving.info
            if option.val
        }
    finally:
        resolving.finish()


def transport(
    parameters: Mapping[str, Any], resolved_parameters: Mapping[str, str] | None = None
) -> Transport:
    """Return the transport for a DSN's parameters. `resolved_parameters`: if available."""
    resolved_parameters = (
        resolved(parameters) if resolved_parameters is None else resolved_parameters
    )
    hosts = [
        resolved_parameters[name] for name in ("host", "hostaddr") if name in resolved_parameters
    ]
    mode = resolved_parameters.get("sslmode")
    # A service file that sets `prefer` looks like one that sets nothing: assume the safe case.
    if mode == _LIBPQ_DEFAULT and _LIBPQ_DEFAULT not in {
        parameters.get("sslmode"),
        os.environ.get("PGSSLMODE"),
    }:
        mode = None
    return Transport(
        host=hosts[0] if hosts else "",
        # Without a mode nothing was read (e.g. the service is missing): treat it as not local.
        is_local="sslmode" in resolved_parameters
        and all(map(_is_local, ",".join(hosts).split(","))),
        mode=mode,
        has_roots="sslrootcert" in resolved_parameters or _is_there(Path(_OWN_ROOTS).expanduser()),
    )


def _is_local(host: str) -> bool:
    """Return whether packets to it stay on this machine."""
    return is_socket(host) or is_loopback(host)


def is_socket(host: str) -> bool:
    """Return whether it is a unix socket; an empty name is libpq's default."""
    return not host or host.startswith(("/", "@"))


def _is_there(path: Path) -> bool:
    """Return whether the file exists. False if this account may not look, as for libpq."""
    try:
        return path.exists()
    except PermissionError:
        return False


def secured(
    parameters: Mapping[str, Any],
    known: Mapping[str, str] | None = None,
    *,
    bundles: Sequence[str] = BUNDLES,
) -> dict[str, str]:
    """Return the parameters to add to a DSN's so that another machine's identity is verified.

    `known`: as `resolved`, if available. `bundles`: see `system_roots`.
    """
    found = transport(parameters, known)
    if found.is_local or found.is_weak:
        return {}
    added = {"sslmode": VERIFIED}
    roots = None if found.has_roots else system_roots(bundles)
    return added if roots is None else {**added, "sslrootcert": roots}


def system_roots(bundles: Sequence[str] = BUNDLES) -> str | None:
    """Return the system's trusted CAs as a value of sslrootcert; None if there are none.

    `bundles`: files that may have them.

    psycopg's bundled libpq finds no system's CAs, except through SSL_CERT_FILE and SSL_CERT_DIR.
    """
    has_system = pq.version() >= _FIRST_WITH_SYSTEM_ROOTS
    looks_elsewhere = bool(os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR"))
    if has_system and (looks_elsewhere or pq.__impl__ != "binary"):
        return "system"
    bundle = next((path for path in bundles if _is_there(Path(path))), None)
    return bundle or ("system" if has_system else None)


REMEDY = "sslmode=verify-full in `dsn`, with sslrootcert=FILE for your own CA; or leave sslmode out"


def weakness(transport: Transport) -> str:
    """Describe the risk of a weak mode."""
    if transport.mode in {"disable", "allow", "prefer"}:
        return "anyone on the network path can read and change everything"
    return "anyone on the network path can answer in the server's place"


def check_line(source: str, parameters: Mapping[str, Any]) -> CheckLine | None:
    """Return the line of `check` about a weak mode; None if there is nothing to report."""
    found = transport(parameters)
    if not found.is_weak:
        return None
    detail = f"sslmode={found.mode} to {found.host}: {weakness(found)}"
    return CheckLine(source, "tls", "warn", detail, REMEDY)

"""Passwords of a private server, in the formats of libpq and of the server."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets

_SALT_BYTES = 16


def random_password() -> str:
    """Return a password that can't be guessed."""
    return secrets.token_urlsafe(32)


def passfile_text(password: str) -> str:
    r"""Return a password file for every host, database and user; ``\\`` and ``:`` are escaped.

    See "The Password File" in the documentation of libpq.
    """
    escaped = password.replace("\\", "\\\\").replace(":", "\\:")
    return f"*:*:*:*:{escaped}\n"


def passfile_password(text: str) -> str:
    """Return the password in such a file."""
    return re.sub(r"\\(.)", r"\1", text.removeprefix("*:*:*:*:").removesuffix("\n"))


def scram_verifier(password: str, *, iterations: int) -> str:
    """Return the server's stored form of an ASCII `password` (RFC 5803, SCRAM-SHA-256).

    `CREATE ROLE`, `ALTER ROLE` and ``initdb --pwfile`` accept it instead of the password.
    """
    salt = secrets.token_bytes(_SALT_BYTES)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode("ascii"), salt, iterations)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    text = [base64.b64encode(part).decode() for part in (salt, stored, server)]
    return f"SCRAM-SHA-256${iterations}:{text[0]}${text[1]}:{text[2]}"

"""The protocol between readers and the keeper of their snapshots: lines of JSON over TCP.

Each side sends a nonce. Every later line carries an HMAC with the token, which only processes of
this Spark application have (`Talk`). Each side's first such line is its greeting: before that, a
reader sends no plan, which contains a DSN, and the keeper reads no more than the few bytes of nonce
and greeting. Tables are sent as pickles in both directions; a pickle is
loaded only after its line is verified. A connection carries one request; for a lease it stays open.
Messages are signed, not encrypted.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import pickle
import secrets
from dataclasses import dataclass, field
from typing import Any

from ingestd.model.errors import IngestdError, OperatorError, TransientError

MAX_LINE_BYTES = 64 << 20
NONCE_BYTES = 33
GREETING_BYTES = 68
"""Lengths of the lines that are read before the peer is authenticated, with their ends."""


@dataclass(frozen=True, slots=True)
class KeeperAddress:
    """Where the keeper listens, and the token that authenticates both sides."""

    host: str
    port: int
    token: str = field(repr=False)


class Talk:
    """One side of a connection: signs the lines it sends, and verifies those it receives.

    `nonces`: the reader's and the keeper's, so that no line can be replayed on another connection.
    The signature also covers the sender and the number of lines before it.
    """

    def __init__(self, token: str, nonces: tuple[str, str], *, is_keeper: bool) -> None:
        self._token = token
        self._nonces = nonces
        self._is_keeper = is_keeper
        self._sent_count = self._received_count = 0

    def line(self, value: dict[str, Any]) -> bytes:
        """Return this side's next line."""
        text = json.dumps(value)
        mark = self._mark(text, self._sent_count, is_keeper=self._is_keeper)
        self._sent_count += 1
        return f"{mark} {text}\n".encode()

    def greeting(self) -> bytes:
        """Return this side's first line, which proves that it has the token."""
        return self.line({})

    def heard(self, line: bytes) -> dict[str, Any] | None:
        """Return the peer's next message; None if its signature is wrong."""
        mark, _, text = line.decode(errors="replace").rstrip("\n").partition(" ")
        expected = self._mark(text, self._received_count, is_keeper=not self._is_keeper)
        self._received_count += 1
        if not hmac.compare_digest(mark.encode(), expected.encode()):
            return None
        found: dict[str, Any] = json.loads(text)
        return found

    def _mark(self, text: str, number: int, *, is_keeper: bool) -> str:
        signed = json.dumps([is_keeper, number, *self._nonces, text])
        return hmac.new(self._token.encode(), signed.encode(), hashlib.sha256).hexdigest()


def new_nonce() -> str:
    """Return a number used once."""
    return secrets.token_hex(16)


def to_text(value: object) -> str:
    """Return a value as a pickle, encoded for a line."""
    return base64.b64encode(pickle.dumps(value)).decode()


def from_text(text: str) -> Any:  # noqa: ANN401 - whatever was written
    """Return the value of a pickle from a verified line."""
    return pickle.loads(base64.b64decode(text))  # noqa: S301 - see the module's docstring


def failure(error: IngestdError) -> dict[str, Any]:
    """Return an error as an answer."""
    reason = error.reason if isinstance(error, TransientError) else None
    return {"failed": error.what, "remedy": error.remedy, "reason": reason}


def raise_failure(answer: dict[str, Any]) -> None:
    """Raise the keeper's answer if it is an error."""
    if "failed" not in answer:
        return
    if answer["reason"] is not None:
        raise TransientError(answer["failed"], reason=answer["reason"], remedy=answer["remedy"])
    raise OperatorError(answer["failed"], remedy=answer["remedy"])

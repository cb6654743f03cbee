"""How readers and the keeper of their snapshots talk: lines of JSON over TCP.

Each side says a nonce; every line after that carries an HMAC by the token that only this Spark
application's processes have (`Talk`). The keeper's first is its greeting: a plan, with its DSN, is
told to nobody else. Tables go as pickles, in both directions; none is loaded before its line is
verified. One connection, one request; for a lease the connection stays open. What is said is
signed, not hidden.
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


@dataclass(frozen=True, slots=True)
class KeeperAddress:
    """Where the keeper listens, and what it knows its own by."""

    host: str
    port: int
    token: str = field(repr=False)


class Talk:
    """One connection as one of its sides has it: all that is said is signed, what is heard checked.

    `nonces`: the reader's and the keeper's, so that nothing can be told again on another
    connection; who says it and how many lines before it are signed too.
    """

    def __init__(self, token: str, nonces: tuple[str, str], *, is_keeper: bool) -> None:
        self._token = token
        self._nonces = nonces
        self._is_keeper = is_keeper
        self._said = self._heard = 0

    def line(self, value: dict[str, Any]) -> bytes:
        """Write the next line of this side."""
        text = json.dumps(value)
        mark = self._mark(text, self._said, is_keeper=self._is_keeper)
        self._said += 1
        return f"{mark} {text}\n".encode()

    def heard(self, line: bytes) -> dict[str, Any] | None:
        """Read the other side's next line; None if it is not from one of ours."""
        mark, _, text = line.decode(errors="replace").rstrip("\n").partition(" ")
        expected = self._mark(text, self._heard, is_keeper=not self._is_keeper)
        self._heard += 1
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
    """Pickle, for a line."""
    return base64.b64encode(pickle.dumps(value)).decode()


def from_text(text: str) -> Any:  # noqa: ANN401 - whatever was written
    """Return what was pickled, of a line that was verified."""
    return pickle.loads(base64.b64decode(text))  # noqa: S301 - see the module's docstring


def failure(error: IngestdError) -> dict[str, Any]:
    """Write an error as an answer."""
    reason = error.reason if isinstance(error, TransientError) else None
    return {"failed": error.what, "remedy": error.remedy, "reason": reason}


def raise_failure(answer: dict[str, Any]) -> None:
    """Raise what the keeper answered, if it is an error."""
    if "failed" not in answer:
        return
    if answer["reason"] is not None:
        raise TransientError(answer["failed"], reason=answer["reason"], remedy=answer["remedy"])
    raise OperatorError(answer["failed"], remedy=answer["remedy"])

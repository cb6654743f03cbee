"""How readers and the keeper of their snapshots talk: lines of JSON over TCP.

The keeper begins with a nonce; every request carries an HMAC of it with the token that only this
Spark application's processes have. Tables go as pickles, in both directions, which is as trusting
as Spark's own workers are. One connection, one request; for a lease the connection stays open.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import pickle
from dataclasses import dataclass, field
from typing import Any

from ingestd.errors import IngestdError, OperatorError, TransientError

MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class KeeperAddress:
    """Where the keeper listens, and what it knows its own by."""

    host: str
    port: int
    token: str = field(repr=False)


def signature(token: str, nonce: str, request: str) -> str:
    """Sign a request."""
    return hmac.new(token.encode(), (nonce + request).encode(), hashlib.sha256).hexdigest()


def signed(token: str, nonce: str, request: dict[str, Any]) -> bytes:
    """Write a request line."""
    text = json.dumps(request)
    return (signature(token, nonce, text) + " " + text + "\n").encode()


def verified(token: str, nonce: str, line: bytes) -> dict[str, Any] | None:
    """Read a request line; None if it is not from one of ours."""
    mark, _, text = line.decode(errors="replace").rstrip("\n").partition(" ")
    if not hmac.compare_digest(mark.encode(), signature(token, nonce, text).encode()):
        return None
    found: dict[str, Any] = json.loads(text)
    return found


def to_text(value: object) -> str:
    """Pickle, for a line."""
    return base64.b64encode(pickle.dumps(value)).decode()


def from_text(text: str) -> Any:  # noqa: ANN401 - whatever was written
    """Give what was pickled, of a line that was verified, or came from the keeper."""
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

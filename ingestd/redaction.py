"""Secrets taken out of text, before anyone reads it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

from ingestd.positions import Lsn

if TYPE_CHECKING:
    from collections.abc import Iterable

MASK = "***"

_MIN_LENGTH = 3
"""Shorter secrets are left to the patterns: masking every 'a' would mask everything."""

_ASSIGNED = re.compile(
    r"((?:\b|_)(?:password|passwd|pwd|pgpassword|secret|secret_access_key|token)['\"]?\s*[=:]\s*)"
    r"('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\s'\"&,;]+)",
    re.IGNORECASE,
)
_IN_URI = re.compile(r"(://[^\s:/@]*):([^\s/]*)@")
_SERVER_DETAIL = re.compile(r"^(DETAIL|CONTEXT): .*$", re.MULTILINE)
"""The lines of a server's error that may quote values of rows."""


def secrets_of(value: str) -> Iterable[str]:
    """Give a secret and the passwords inside it, as written and as meant (a DSN holds both)."""
    yield value
    for pattern in (_ASSIGNED, _IN_URI):
        for match in pattern.finditer(value):
            inner = match[2]
            yield inner
            yield unquote(inner)
            if inner[:1] in "'\"":
                yield re.sub(r"\\(.)", r"\1", inner[1:-1])


class Redactor:
    """Replaces known secrets, and whatever looks like a password, by `MASK`.

    `known`: the secret values of the config. The object's own repr shows none of them.
    """

    __slots__ = ("_known",)

    def __init__(self, known: Iterable[str] = ()) -> None:
        found = {s for value in known for s in secrets_of(value) if len(s) >= _MIN_LENGTH}
        # the longest first: a DSN goes whole before its password does
        ordered = sorted(found, key=lambda s: (-len(s), s))
        self._known = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def __repr__(self) -> str:
        return "Redactor()"

    def text(self, text: str) -> str:
        """Give the text without secrets and without a server error's row values."""
        if self._known is not None:
            text = self._known.sub(MASK, text)
        text = _ASSIGNED.sub(rf"\1{MASK}", text)
        text = _IN_URI.sub(rf"\1:{MASK}@", text)
        return _SERVER_DETAIL.sub(rf"\1: {MASK}", text)

    def tree(self, value: object) -> object:
        """Give a value for JSON: strings redacted at any depth, LSNs and others as text."""
        if isinstance(value, str):
            return self.text(value)
        if value is None or (isinstance(value, int | float) and not isinstance(value, Lsn)):
            return value
        if isinstance(value, dict):
            return {self.text(str(k)): self.tree(v) for k, v in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.tree(v) for v in value]
        if isinstance(value, bytes | bytearray | memoryview):
            return f"<{len(value)} bytes>"
        return self.text(str(value))

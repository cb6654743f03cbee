"""Removal of secrets from text before it is shown."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from ingestd.model.lsn import Lsn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MASK = "***"

_MIN_LENGTH = 3
"""Shorter secrets are left to the patterns: masking every 'a' would mask everything."""
_MIN_LINE_LENGTH = 16
"""In a secret of several lines, shorter lines are not masked separately."""

_NAMES = (
    r"(?:password|passwd|passphrase|secret_?access_?key|session_?token|client_?secret"
    r"|(?:shared_?)?access_?key|account_?key|private_?key|api_?key|mask_?key"
    r"|(?:\b|_)(?:pwd|secret|token|sas|sig|signature|credential))"
)
# Neither "http.token: is not a token" nor a text that explains the syntax.
_ASSIGNED = re.compile(
    rf"({_NAMES}(?:['\"]\s*[=:]\s*|\s*=\s*|:(?=\S)|:\s*(?=['\"])|:\s+(?=[^\s'\"&,;]{{16}})))"
    r"(?!['\"]?(?:env:|file:|\.\.\.))"
    r"('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\s'\"&,;]+)",
    re.IGNORECASE,
)
# As in a DSN of keywords and values, where an unquoted value ends only at unescaped white space.
# A quote at its end belongs to the surrounding text (libpq, "Keyword/Value Connection Strings").
_IN_DSN = re.compile(
    r"((?<![\w?&;/-])(?:ssl)?password\s*=\s*)"
    r"(?!['\"]|env:|file:|\.\.\.)"
    r"((?:\\.|(?!['\"](?:[\s,;:)\]}]|\Z))[^\s\\])+)",
    re.IGNORECASE | re.DOTALL,
)
_IN_URI = re.compile(r"(://[^\s:/@]*):([^\s/]*)@")
_WORDS = ("pass", "pwd", "secret", "token", "key", "sas", "sig", "credential")
_PATTERNS = (
    (("password",), _IN_DSN, rf"\1{MASK}"),
    (_WORDS, _ASSIGNED, rf"\1{MASK}"),
    (("://",), _IN_URI, rf"\1:{MASK}@"),
    (
        ("bearer",),
        re.compile(r"(\bbearer\s+)[A-Za-z0-9._~+/-]{16,}=*", re.IGNORECASE),
        rf"\1{MASK}",
    ),
    (
        ("authorization",),
        # A shell's $(...) or $NAME in a remedy is a placeholder, not the secret.
        re.compile(
            r"(\bauthorization['\"]?\s*[:=]\s*['\"]?)(?!\s*bearer \$[(A-Z])[^'\"\n]+", re.IGNORECASE
        ),
        rf"\1{MASK}",
    ),
    (
        ("private key-----",),
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*-----|\Z)", re.DOTALL),
        MASK,
    ),
    # Lines of a server error or its traceback that may quote row values.
    (
        ("detail:", "context:", "line "),
        re.compile(r"^(DETAIL|CONTEXT|LINE \d+): .*$", re.MULTILINE),
        rf"\1: {MASK}",
    ),
    (
        ("psycopg.errors.",),
        re.compile(r"^(.*\bpsycopg\.errors\.\w+): .*$", re.MULTILINE),
        rf"\1: {MASK}",
    ),
)
"""One of these words, in lower case, must occur; then the pattern is replaced by the text."""

_IN_ENVIRONMENT = re.compile(
    r"(PGPASSWORD|PGSSLPASSWORD|(AWS|AZURE|GOOGLE)_\w*(SECRET|TOKEN|KEY|SAS)\w*)(?<!FILE)(?<!PATH)\Z"
)
_LONGEST_NAME = 8
"""Shorter values in the environment are names or flags, not secrets."""


def secrets_of(value: str) -> Iterator[str]:
    """Yield a secret and those inside it, both as written and unescaped (a DSN holds both)."""
    yield value
    if "\n" in value:
        yield from (line for line in value.splitlines() if len(line.strip()) >= _MIN_LINE_LENGTH)
    for held in _in_json(value):
        yield from secrets_of(held)
    for pattern in (_IN_DSN, _ASSIGNED, _IN_URI):
        for match in pattern.finditer(value):
            inner = match[2]
            yield inner
            yield unquote(inner)
            yield unquote_plus(inner)
            unquoted = inner[1:-1] if inner[:1] in "'\"" else inner
            yield re.sub(r"\\(.)", r"\1", unquoted, flags=re.DOTALL)


def secrets_in_environment(environ: Mapping[str, str]) -> list[str]:
    """Return the values that libpq and object stores read from the environment on their own."""
    return [
        value
        for name, value in environ.items()
        if _IN_ENVIRONMENT.match(name) and len(value) >= _LONGEST_NAME
    ]


def _in_json(value: str) -> Iterable[str]:
    """Return the secrets in the JSON of a service account."""
    if not value.lstrip().startswith("{"):
        return []
    try:
        found = json.loads(value)
    except ValueError:
        return []
    texts = {name: text for name, text in found.items() if isinstance(text, str)}
    return [text for name, text in texts.items() if _ASSIGNED.match(f"{name}=x")]


def _forms(secret: str) -> Iterable[str]:
    """Yield a text as libraries write it: in URLs, in code, in JSON, in DSNs."""
    yield secret
    yield quote(secret)
    yield quote(secret, safe="")
    yield quote_plus(secret)
    yield repr(secret)[1:-1]
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield re.sub(r"([\\'])", r"\\\1", secret)


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    # the longest first: a complete DSN must be replaced before its password is
    ordered = sorted(texts, key=lambda s: (-len(s), s))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


class Redactor:
    """Replaces known secrets, and anything that looks like a password, by `MASK`.

    `known`: the secret values of the config. The object's own repr shows none of them.
    """

    __slots__ = ("_known", "_texts")

    def __init__(self, known: Iterable[str] = ()) -> None:
        inner = {s for value in known for s in secrets_of(value) if len(s) >= _MIN_LENGTH}
        self._texts = frozenset(form for secret in inner for form in _forms(secret))
        self._known = _any_of(self._texts)

    def learn(self, other: Redactor) -> None:
        """Also replace the secrets that `other` knows."""
        self._texts |= other._texts
        self._known = _any_of(self._texts)

    def __repr__(self) -> str:
        return "Redactor()"

    def text(self, text: str) -> str:
        """Return the text without secrets and without row values from server errors."""
        if self._known is not None:
            text = self._known.sub(MASK, text)
        small = text.lower()
        for words, pattern, shown in _PATTERNS:
            if any(word in small for word in words):
                text = pattern.sub(shown, text)
        return text

    def tree(self, value: object) -> object:
        """Return a value for JSON: strings redacted at any depth, LSNs and other types as text."""
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

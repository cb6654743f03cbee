"""Lies: the messages that a dishonest server may send instead of honest ones, field by field.

A message is a list of fields. A lie is about one of them: another number, another text, truncated,
omitted or repeated. An enclosing length (`Enclosing`) stays correct if the lie is inside it, or the
reader would never get that far; separate lies are about that length itself.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_WIDTHS = {"c": 1, "B": 1, "H": 2, "h": 2, "I": 4, "i": 4, "Q": 8, "q": 8}
LONG = 100_000
"""Length in bytes of a text that no server sends as a name."""
_TEXTS = (b"", b"\xff\xfe\xc3", b"\0\0\0", b"\x1b[31m", b"x" * LONG)


@dataclass(frozen=True, slots=True)
class Field:
    """One field and its bytes. `form`: a number's format in `struct`, 'c' a kind, 's' a text, 'z' a
    text with its terminator."""

    name: str
    form: str
    content: bytes

    def lies(self) -> Iterator[tuple[str, bytes]]:
        """Yield the lies about this field, with their names."""
        if self.form in _WIDTHS:
            yield from self._numbers()
        else:
            body = self.content[:-1] if self.form == "z" else self.content
            end = self.content[len(body) :]
            yield from ((f"text {text[:4]!r}", text + end) for text in _TEXTS if text != body)
            if self.form == "z":
                yield "no terminator", body
        yield "left out", b""
        yield "repeated", self.content * 2
        yield "cut", self.content[:-1]
        yield "longer", self.content + b"\0"

    def _numbers(self) -> Iterator[tuple[str, bytes]]:
        bits = 8 * _WIDTHS[self.form]
        honest = int.from_bytes(self.content)
        most = (1 << bits) - 1
        odd = (0, 1, honest - 1, honest + 1, most >> 1, (most >> 1) - 4, (most >> 1) + 1, most)
        if self.form == "c":
            odd = (*odd, *b"BCRTOIUDMLSEcAbPKrpYdwksWHEZNnKOtu", 0)
        for number in sorted({n & most for n in odd} - {honest}):
            yield f"{number:#x}", number.to_bytes(bits // 8)


def number(name: str, form: str, value: int) -> Field:
    """Return a field with a number."""
    return Field(name, form, struct.pack(f">{form}", value))


def kind(value: str) -> Field:
    """Return the byte with the kind of a message."""
    return Field("kind", "c", value.encode())


def text(name: str, value: bytes | str) -> Field:
    """Return a text with its terminator."""
    return Field(name, "z", (value.encode() if isinstance(value, str) else value) + b"\0")


def raw(name: str, value: bytes) -> Field:
    """Return bytes whose length is in another field."""
    return Field(name, "s", value)


@dataclass(frozen=True, slots=True)
class Enclosing:
    """The length of all fields up to the message's end; `added`: counted in addition."""

    name: str
    added: int = 0


Message = tuple[Field | Enclosing, ...]


def written(message: Sequence[Field | Enclosing]) -> bytes:
    """Return the message as an honest server sends it."""
    return b"".join(field.content for field in _settled(message))


def _settled(message: Sequence[Field | Enclosing]) -> list[Field]:
    """Return the fields with correct enclosing lengths."""
    found: list[Field] = []
    nbytes = 0
    for field in reversed(message):
        settled = (
            number(field.name, "i", nbytes + field.added) if isinstance(field, Enclosing) else field
        )
        nbytes += len(settled.content)
        found.append(settled)
    return found[::-1]


def lies(message: Message) -> Iterator[tuple[str, bytes]]:
    """Yield the lies about a message, with their names."""
    for at, field in enumerate(message):
        honest = _settled(message)[at]
        if isinstance(field, Enclosing):  # the enclosed fields stay as they are
            before, after = written_parts(message, at)
            for name, content in honest.lies():
                yield f"{field.name} {name}", before + content + after
            continue
        for name, content in field.lies():
            lying = (*message[:at], replace(field, content=content), *message[at + 1 :])
            yield f"{field.name} {name}", written(lying)
        yield f"ends before {field.name}", written(message[:at])
    yield "twice", written(message) * 2
    yield "not at all", b""


def written_parts(message: Message, at: int) -> tuple[bytes, bytes]:
    """Return the bytes that an honest server sends before and after a field."""
    settled = _settled(message)
    return (
        b"".join(field.content for field in settled[:at]),
        b"".join(field.content for field in settled[at + 1 :]),
    )


def lying_scripts(script: Sequence[tuple[str, Message]]) -> Iterator[tuple[str, bytes]]:
    """Yield scripts with a lie: in one message, or two messages swapped."""
    honest = [written(message) for _, message in script]
    for at, (name, message) in enumerate(script):
        before, after = b"".join(honest[:at]), b"".join(honest[at + 1 :])
        for lie, sent in lies(message):
            yield f"{name}: {lie}", before + sent + after
        for other in range(at + 1, len(script)):
            order = [*honest]
            order[at], order[other] = order[other], order[at]
            yield f"{name}: in place of {script[other][0]} ({other})", b"".join(order)

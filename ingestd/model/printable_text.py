"""Safe text for a terminal: table and column names may hold any character.

A terminal interprets what follows an escape character: it may change its title or clipboard, or
show lines that no program printed.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from unicodedata import category

_TOKEN = re.compile(r"""[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|"(?:[^"]|"")*\"""", re.DOTALL)
"""Quoted parts of SQL; a quote inside a name or text is doubled."""


def printable(text: str) -> str:
    """Return a text on one line, without control characters.

    Spaces of any width stay: they may belong to a name in SQL that an operator pastes.
    """
    return "".join(c if _is_printable(c) else " " for c in text)


def printable_sql(statement: str) -> str:
    r"""Return an equivalent statement in which every name and text is printable.

    Such a name is written with escapes: ``U&"nopk\001B[31m"``. Source: PostgreSQL documentation,
    "Lexical Structure".
    """
    return _TOKEN.sub(lambda found: _escaped(found[0]), statement)


def printable_command(words: Iterable[str]) -> str:
    """Return a shell command in which every word is printable: ``$'...'`` where necessary."""
    return " ".join(map(_shell_word, words))


def printable_json(text: str) -> str:
    """Return an equivalent JSON document in which every character but line ends is printable."""
    return "".join(c if c == "\n" or _is_printable(c) else json.dumps(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """Return a text as `printable` does, lines joined by spaces; inner spaces stay."""
    return printable(" ".join(filter(None, (line.strip(" ") for line in text.split("\n")))))


def _is_printable(character: str) -> bool:
    return character.isprintable() or category(character) == "Zs"


def _escaped(token: str) -> str:
    if all(map(_is_printable, token)):
        return token
    if token[0] in "eE":
        return "".join(c if _is_printable(c) else f"\\U{ord(c):08X}" for c in token)
    doubled = token.replace("\\", "\\\\")
    return "U&" + "".join(c if _is_printable(c) else _code(c) for c in doubled)


def _code(character: str) -> str:
    code = ord(character)
    return f"\\{code:04X}" if code <= _MAX_OF_FOUR_DIGITS else f"\\+{code:06X}"


_MAX_OF_FOUR_DIGITS = 0xFFFF


def _shell_word(word: str) -> str:
    if all(map(_is_printable, word)):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(map(_shell_character, escaped)) + "'"


def _shell_character(character: str) -> str:
    if _is_printable(character):
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors="surrogateescape"))


def printable_lines(text: str) -> str:
    """Return a text as `printable` does, but keep its line ends."""
    return "\n".join(map(printable, text.split("\n")))

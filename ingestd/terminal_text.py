"""Texts as a terminal may have them: names of tables and columns hold whatever somebody wrote.

A terminal obeys what comes after an escape character: it changes its title and clipboard, or shows
lines that nobody printed.
"""

from __future__ import annotations

from unicodedata import category


def printable(text: str) -> str:
    """Give a text on one line, without what a terminal would obey.

    Spaces of any width stay: they may be part of a name in SQL that is there to be pasted.
    """
    return "".join(c if c.isprintable() or category(c) == "Zs" else " " for c in text)


def printable_lines(text: str) -> str:
    """Give a text as `printable`, but for the ends of its lines."""
    return "\n".join(map(printable, text.split("\n")))

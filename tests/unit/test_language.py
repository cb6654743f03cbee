"""The English of the code and of the docs: words that a stranger stops at stay out."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.source_code import READS_CODE, ROOT, modules, statements, text_of

pytestmark = READS_CODE
CODE = ("ingestd", "spark_jobs")

STANDARD = {
    r"anew": "again, re-read, re-create",
    r"for ever": "indefinitely",
    r"(?<!I )(?:told|tells|telling|tell)": "reported, logged, sent",
    r"whoever|somebody|nobody": "the client, the session, an operator",
    r"by itself|by themselves": "automatically",
    r"without a word": "silently",
    r"in vain": "without effect",
    r"of its own": "its own",
    r"(?:is|are|was|were) (?:not )?to be": "must be, will be",
    r"(?:is|are|was|were) (?:not |no longer )?there": "exists",
    r"(?:goes|go|went|going|gone) on": "continues",
    r"(?:is|are|was|were|be|been) gone": "missing, dropped",
    r"lies? (?:below|before|behind|beyond)": "precedes, follows",
    r"made again": "recreated",
    r"begun again|begins again": "restarted",
    r"look(?:s|ed|ing)? (?:at|up|over) whether": "check",
    r"a person must": "an operator must",
    r"mends?|mended": "fix",
}
"""A regular expression of what is not written here, by the words that are."""
BANNED = re.compile(r"\b(?:" + "|".join(STANDARD) + r")\b", re.IGNORECASE)
BARE_VERBS = re.compile(r"(?:Give|Gives|Take that|Whether|Say|Tell|Have|Look)\b")
"""How a docstring does not begin: it says what is returned or done ("Return", PEP 257)."""

NAMES = {'"nobody"'}
"""Strings that name something of others: the account of an operating system."""
QUOTED = re.compile(r"``[^`]*``|`[^`]*`")


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Return the comments and strings of a module, by line, without what is quoted as code."""
    source = path.read_text("utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) and token.string not in NAMES:
            text = QUOTED.sub(lambda quoted: "\n" * quoted.group().count("\n"), token.string)
            yield from enumerate(text.splitlines(), token.start[0])


def unquoted(page: Path) -> str:
    return QUOTED.sub("", page.read_text("utf-8"))


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def found_in(lines: Iterator[tuple[int, str]], path: Path) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {word.group()!r} in {text.strip()}"
        for line, text in lines
        for word in BANNED.finditer(text)
    ]


def test_the_code_is_written_in_standard_words() -> None:
    found = [one for path in modules(*CODE) for one in found_in(texts_of(path), path)]
    assert found == []


def test_the_docs_are_written_in_standard_words() -> None:
    found = [
        one
        for path in pages()
        for one in found_in(
            enumerate(QUOTED.sub("", path.read_text("utf-8")).splitlines(), 1), path
        )
    ]
    assert found == []


def test_docstrings_begin_with_what_is_returned_or_done() -> None:
    found = []
    for path in modules(*CODE):
        for node in statements(text_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if BARE_VERBS.match(text):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0]}")
    assert found == []


@pytest.mark.parametrize("word", ["read anew", "nobody answers", "it goes on", "is to be read"])
def test_a_word_is_found(word: str) -> None:
    assert BANNED.search(word)

"""Files are opened for writing by `file_creation`, `tempfile`, or for a reason below."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests.harness.source_code import READS_CODE, modules, name_of, nodes, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = READS_CODE
MEANT = {
    ("ingestd/process/file_creation.py", "os.open"): "it is the rule",
    (
        "ingestd/lake/store/plain_files.py",
        "os.open",
    ): "below the table's folder, O_EXCL, O_NOFOLLOW; or for reading, to sync it",
    ("ingestd/http/command_token.py", "os.open"): "O_EXCL, O_NOFOLLOW below its folder; renamed",
    ("spark_jobs/session.py", "open"): "a lock in the user's own cache folder; nothing is written",
    (
        "spark_jobs/source/keeper_process.py",
        "os.open",
    ): "a lock in a private folder; nothing is written",
}
_OPENS = {"open", "write_text", "write_bytes", "touch"}
_WRITES = tuple(quote + mode for quote in "'\"" for mode in "wxa")


def written(source: str) -> Iterator[str]:
    """Name the calls that open files for writing."""
    for node in nodes(source):
        if not isinstance(node, ast.Call) or _last_name(node.func) not in _OPENS:
            continue
        called = ast.unparse(node.func)
        name = _last_name(node.func)
        words = [ast.unparse(each) for each in (*node.args, *(k.value for k in node.keywords))]
        if called == "os.open":
            if not any(word == "os.devnull" or "O_RDONLY" in word for word in words):
                yield called
        elif name in {"write_text", "write_bytes", "touch"} or (
            name == "open" and any(word.startswith(_WRITES) for word in words)
        ):
            yield name


def _last_name(called: ast.expr) -> str:
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def test_files_are_created_by_one_rule() -> None:
    found = {
        (name_of(path), call)
        for path in modules("ingestd", "spark_jobs")
        for call in written(text_of(path))
    }
    assert found == MEANT.keys()


def test_such_calls_are_found() -> None:
    lines = {
        "path.write_text(text)": ["write_text"],
        "path.open('ab')": ["open"],
        "open(path, mode='w')": ["open"],
        "open(path)": [],
        "pa.OSFile(path, 'rb')": [],
        "os.open(path, os.O_RDONLY)": [],
        "os.open(path, os.O_CREAT | os.O_EXCL)": ["os.open"],
    }
    assert {line: list(written(line)) for line in lines} == lines

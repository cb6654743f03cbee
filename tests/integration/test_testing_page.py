"""The examples of docs/testing.md run as they are printed: files of tests, without a plugin."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
TEXT = PAGE.read_text("utf-8")
EXAMPLES = dict(re.findall(r"^## (.*?)$.*?^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE))
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:xdist")


def test_every_example_has_a_title() -> None:
    assert len(EXAMPLES) == TEXT.count("```python") == 3


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_passes(title: str, tmp_path: Path) -> None:
    path = tmp_path / "test_example.py"
    path.write_text(EXAMPLES[title])
    command = [sys.executable, *PYTEST, "--rootdir", str(tmp_path), str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_names_in_the_table_exist() -> None:
    rows = re.findall(r"^\| `(testing\.[\w.]+)` \| (.*?) \|", TEXT, re.MULTILINE)
    assert len(rows) == 10
    for module, names in rows:
        found = import_module(f"ingestd.{module}")
        assert [name for name in re.findall(r"`(\w+)`", names) if not hasattr(found, name)] == []

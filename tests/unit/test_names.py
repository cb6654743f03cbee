"""A name has one meaning: what keeps the names in order."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_class_name_exists_once() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for package in ("ingestd", "spark_jobs"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(path.relative_to(ROOT).as_posix())
    assert len(found) > 500
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}

"""The reference pages of the documentation match the code (`make docs-reference`)."""

from __future__ import annotations

import re
from inspect import get_annotations
from typing import TYPE_CHECKING, get_args

import pytest
from pydantic import BaseModel

from docs_site import configuration, events
from docs_site.error_texts import texts
from docs_site.pages import FOLDER, PAGES, ROOT
from ingestd.config import Config
from ingestd.postgres.settings import SETTINGS

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURE = ROOT / "ARCHITECTURE.md"
MOST_BYTES = 15_000
INTERNALS = ROOT / "docs" / "internals"
_PATH = re.compile(r"`([\w./-]+\.(?:py|sql|c)|[\w./-]+/|tests/[\w./-]+)`")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_is_current(name: str) -> None:
    path = FOLDER / name
    there = path.read_text("utf-8") if path.exists() else ""
    made = PAGES[name]()
    news = [line for line in made.splitlines() if line not in there.splitlines()]
    assert there == made, (
        f"docs/reference/{name} is not current; run `make docs-reference`: {news[:5]}"
    )


def test_every_model_of_the_config_is_on_the_page() -> None:
    models: set[type[BaseModel]] = {Config, *SETTINGS.values()}
    seen: set[type[BaseModel]] = set()
    while models:
        model = models.pop()
        seen.add(model)
        bases = [base for base in model.__mro__ if issubclass(base, BaseModel)]
        keyed = {b for b in bases if set(get_annotations(b)) & set(model.model_fields)}
        assert keyed <= configuration.covered()
        models |= _sections_of(model) - seen


def _sections_of(model: type[BaseModel]) -> set[type[BaseModel]]:
    hints = [field.annotation for field in model.model_fields.values()]
    parts = {part for hint in hints for part in (hint, *get_args(hint))}
    return {part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)}


def test_an_event_without_a_meaning_is_reported(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(
        "def f(self):\n    why = {'reason': 1}\n    self._log.info('new.event', table=1, **why)\n"
    )
    assert list(events.events(tmp_path)["new.event"].facts) == ["table", "reason"]
    with pytest.raises(ValueError, match=r"new\.event: no meaning.*daemon\.started: no such event"):
        events.page(tmp_path, tmp_path)


def test_an_event_logged_by_a_chosen_method_has_both_levels(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(
        "def f(self, bad):\n"
        "    log = self._log.error if bad else self._log.info\n"
        "    log('a.b', x=1)\n"
    )
    assert events.events(tmp_path)["a.b"].levels == {"error", "info"}


def test_texts_of_errors_are_found_with_their_remedies(tmp_path: Path) -> None:
    path = tmp_path / "new.py"
    path.write_text(
        "def f(table, name):\n"
        "    what, remedy = f'no {name}', f'make {name}'\n"
        "    if name:\n"
        "        what, remedy = 'no table', 'CREATE TABLE'\n"
        "    raise TableError(table.id, what, remedy=remedy)\n"
    )
    found = {(t.what, t.remedy) for t in texts(path, ["TableError"])}
    assert found == {("no <name>", "make <name>"), ("no table", "CREATE TABLE")}


def test_all_pages_made_are_there() -> None:
    made = {path.name for path in FOLDER.glob("*.md")}
    assert made == set(PAGES)
    assert FOLDER.is_relative_to(ROOT / "docs")


def test_architecture_is_short() -> None:
    assert ARCHITECTURE.stat().st_size <= MOST_BYTES


def test_the_tree_has_every_folder() -> None:
    assert _tree(ARCHITECTURE.read_text("utf-8")) == {
        folder.relative_to(ROOT).as_posix()
        for package in ("ingestd", "spark_jobs")
        for folder in (ROOT / package, *(ROOT / package).rglob("*/"))
        if folder.name != "__pycache__"
    }


def test_a_tree_is_read_by_its_indentation() -> None:
    text = "```\na/\n  b/      what\n    c/\n  d/  and x/\ne/\n```\n  f/\n"
    assert _tree(text) == {"a", "a/b", "a/b/c", "a/d", "e"}


def _tree(text: str) -> set[str]:
    """Return the folders of the code block that consists of a tree."""
    found: set[str] = set()
    parents: list[str] = []
    for block in text.split("```")[1::2]:
        for indent, name in re.findall(r"^((?:  )*)(\w+)/(?= |$)", block, re.MULTILINE):
            parents[len(indent) // 2 :] = [name]
            found.add("/".join(parents))
    return found


@pytest.mark.parametrize(
    "page", [ARCHITECTURE, *sorted(INTERNALS.glob("*.md"))], ids=lambda p: p.name
)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    below = re.search(r"named by their\s+path\s+below\s+`([\w/]+)/`", text)
    roots = [ROOT, ROOT / "ingestd", ROOT / "tests", ROOT / (below[1] if below else "ingestd")]
    named = {name for name in _PATH.findall(text) if not name.startswith(("/", "_", "<"))}
    known = {path.name for path in (ROOT / "ingestd").rglob("*.*")}
    missing = {name for name in named - known if not any((root / name).exists() for root in roots)}
    assert missing == set()


def test_the_design_has_the_sections_that_are_cited() -> None:
    text = (INTERNALS / "design.md").read_text("utf-8")
    sections = set(re.findall(r"^#+ (\d[\d.]*) ", text, re.MULTILINE))
    cited = {
        number
        for package in ("ingestd", "spark_jobs", "tests")
        for path in (ROOT / package).rglob("*.py")
        for numbers in re.findall(
            r"[Dd]esign\s+(?:sections?\s+)?((?:\d[\d.]*\d|\d)(?:\s+and\s+\d[\d.]*)?)",
            path.read_text("utf-8"),
        )
        for number in re.findall(r"\d(?:[\d.]*\d)?", numbers)
    }
    assert len(cited) > 5
    assert cited <= sections

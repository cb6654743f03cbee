"""The reference pages of the documentation say what the code says (`make docs-reference`)."""

from __future__ import annotations

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


def test_an_event_without_a_meaning_is_told(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(
        "def f(self):\n    why = {'reason': 1}\n    self._log.info('new.event', table=1, **why)\n"
    )
    assert list(events.events(tmp_path)["new.event"].facts) == ["table", "reason"]
    with pytest.raises(ValueError, match=r"new\.event: no meaning.*daemon\.started: no such event"):
        events.page(tmp_path, tmp_path)


def test_an_event_that_is_logged_by_a_chosen_method_has_both_levels(tmp_path: Path) -> None:
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

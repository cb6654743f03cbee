"""A hook of mkdocs that rewrites links to files outside docs/ for the site.

The pages are also read in the repository, where `../ARCHITECTURE.md` is a working link. On the site
such a file is either a separate page (`PAGES`, under `project/`), or only named.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

PAGES = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "benchmarks/RESULTS.md",
    "deploy/spark-submit.md",
)
"""Markdown files elsewhere in the repository that are pages of the site."""
_PLACE = "project/"
_LINK = re.compile(r"(!?)\[([^\]\n]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from elsewhere, and the pictures that they show."""
    root = Path(config.config_file_path).parent
    for name in PAGES:
        content = (root / name).read_text("utf-8")
        files.append(File.generated(config, _PLACE + name, content=content))
        for found in _LINK.finditer(content):
            if found[1]:
                picture = posixpath.normpath(posixpath.join(posixpath.dirname(name), found[3]))
                shown = File.generated(config, _PLACE + picture, abs_src_path=str(root / picture))
                files.append(shown)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the page's links to their targets on the site, or only name these."""
    del config
    uri = page.file.src_uri
    source = uri.removeprefix(_PLACE) if uri.startswith(_PLACE) else f"docs/{uri}"
    here = posixpath.dirname(uri)

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[3]))
        on_site = target.removeprefix("docs/") if target.startswith("docs/") else _PLACE + target
        if files.get_file_from_path(on_site) is None and not target.startswith("docs/"):
            return f"`{target}`" if link[2].strip("`") in target else f"{link[2]} (`{target}`)"
        return f"{link[1]}[{link[2]}]({posixpath.relpath(on_site, here or '.')}{link[4] or ''})"

    return _LINK.sub(moved, markdown)

"""Generation of the reference pages from the code: `make docs-reference`."""

from __future__ import annotations

import sys

from docs_site.pages import FOLDER, PAGES


def main() -> int:
    """Write the pages that are not current, and print their names."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        path, text = FOLDER / name, page()
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            sys.stdout.write(f"{path.relative_to(FOLDER.parent.parent)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

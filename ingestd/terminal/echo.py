"""What the commands print, besides tables and progress: nothing in it is obeyed by a terminal.

Texts come from servers, catalogs and the lake, and have names of any characters.
"""

from __future__ import annotations

import json
from typing import Any

import typer

from ingestd.model.printable_text import printable_json, printable_lines


def echo(text: str = "", *, err: bool = False) -> None:
    """Print a text as `printable_lines` returns it. `err`: to standard error."""
    typer.echo(printable_lines(text), err=err)


def echo_json(document: Any) -> None:  # noqa: ANN401
    """Print a document as JSON, in which letters of any alphabet stay as they are."""
    typer.echo(printable_json(json.dumps(document, indent=2, ensure_ascii=False)))

"""docs/reference/commands.md: every command, from its --help."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.main import get_command

from docs_site.markdown import MADE_BY, table
from ingestd import cli
from ingestd.cli.examples import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Iterator

_INTRO = """# Commands

`ingestd COMMAND --help` prints the same on a terminal. Exit codes: 0 success; 1 a fault that an operator must
fix, or a question answered with no; 2 wrong usage or config; 75 a transient fault for which the command gave
up; 130 Ctrl-C ended the watching of a snapshot, or a verification.

`ingestd --install-completion`, in bash, zsh or fish, makes that shell complete commands, options, and names
of sources and tables from its next start on. The names are those of `ingestd.toml` in the working
directory, or of the file of `--config` if that option precedes them, and of a local lake.
"""
_COMMON = {"help", "debug"}
"""Options that every command has."""


def page() -> str:
    """Return the page."""
    commands: dict[str, Any] = get_command(cli.app).commands  # type: ignore[attr-defined]
    parts = (line for name, command in commands.items() for line in _command(name, command))
    return MADE_BY + _INTRO + "".join(parts)


def _command(name: str, command: Any) -> Iterator[str]:  # noqa: ANN401 - click's or typer's class
    yield f"\n## {name}\n\n{inspect.cleandoc(command.help or '')}\n"
    arguments = " ".join(map(_usage, filter(_is_argument, command.params)))
    yield f"\n```sh\n# ingestd {name} [OPTIONS] {arguments}".rstrip() + "\n"
    for example in EXAMPLES[name]:
        yield f"{example}\n"
    yield "```\n"
    options = [p for p in command.params if p.name not in _COMMON and not _is_argument(p)]
    if options:
        yield "\n" + table(["option", "meaning"], map(_option, options))


def _usage(argument: Any) -> str:  # noqa: ANN401
    name = f"{argument.metavar}{'...' if argument.nargs == -1 else ''}"
    return name if argument.required else f"[{name}]"


def _is_argument(parameter: Any) -> bool:  # noqa: ANN401
    return str(parameter.param_type_name) == "argument"


def _option(parameter: Any) -> list[str]:  # noqa: ANN401
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    value = f" {parameter.metavar}" if parameter.metavar and not parameter.is_flag else ""
    shown = parameter.show_default
    default = shown if isinstance(shown, str) else parameter.default
    is_told = not parameter.is_flag and isinstance(default, str | int | Path)
    meaning = parameter.help or ""
    required = " Required." if parameter.required else ""
    return [f"`{names}{value}`", meaning + (f" Default: `{default}`." if is_told else required)]

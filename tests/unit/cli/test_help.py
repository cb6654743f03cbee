"""The command line's help, its errors on a terminal, and what a shell completes."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from ingestd import cli
from ingestd.cli.commands.status import with_value
from ingestd.cli.errors import wrapped
from ingestd.cli.examples import EXAMPLES

COMMANDS: dict[str, Any] = get_command(cli.app).commands  # type: ignore[attr-defined]
COLUMNS = 80


def shown(*words: str) -> str:
    done = CliRunner().invoke(cli.app, [*words, "--help"], terminal_width=COLUMNS)
    assert done.exit_code == 0
    return done.stdout


def test_the_list_of_commands_fits_and_cuts_nothing_short() -> None:
    text = shown()
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert "..." not in text.partition("Commands:")[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_help_fits_and_ends_with_an_example_that_is_right(name: str) -> None:
    text = shown(name)
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert "[[" not in text
    examples = text.partition("Example")[2].splitlines()[1:]
    assert [line.strip() for line in examples] == list(EXAMPLES[name])
    for example in EXAMPLES[name]:
        program, command, *arguments = shlex.split(example)
        assert (program, command) == ("ingestd", name)
        COMMANDS[name].make_context(name, arguments)  # raises UsageError


@pytest.mark.parametrize(
    ("words", "read"),
    [
        (["--watch"], ["--watch=2s"]),
        (["--watch", "-c", "f"], ["--watch=2s", "-c", "f"]),
        (["--watch", "5", "-c", "f"], ["--watch", "5", "-c", "f"]),
        (["--watch=5"], ["--watch=5"]),
        (["-c", "f"], ["-c", "f"]),
    ],
)
def test_watch_may_have_a_value_or_none(words: list[str], read: list[str]) -> None:
    assert with_value(words, "--watch", "2s") == read


def test_what_is_read_is_wrapped_and_what_is_pasted_is_not() -> None:
    remedy = (
        'ALTER TABLE "public"."a table with a long name" REPLICA IDENTITY FULL; -- as its owner'
    )
    text = f"ingestd: {'word ' * 30}end\n  remedy: {'prose ' * 20}end\n  remedy: {remedy}"
    lines = wrapped(text, COLUMNS).splitlines()
    assert lines[-1] == f"  remedy: {remedy}"
    assert max(map(len, lines[:-1])) <= COLUMNS
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert lines[1].startswith("  word")

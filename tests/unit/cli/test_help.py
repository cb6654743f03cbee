"""The command line's help, its errors on a terminal, and what a shell completes."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from ingestd import cli
from ingestd.cli.commands.status import with_value
from ingestd.cli.errors import wrapped
from ingestd.cli.examples import EXAMPLES

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS: dict[str, Any] = get_command(cli.app).commands  # type: ignore[attr-defined]
COLUMNS = 80
CONFIG = """
[lake]
uri = "./lake"
[sources.shop]
kind = "wal"
dsn = "dbname=x"
tables = ["public.*", "public.odd", "!public.no"]
[sources.shop.table."public.described"]
[sources.crm]
"""


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


def test_an_error_on_a_terminal_breaks_between_words(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(CONFIG)
    leader, follower = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ingestd", "status", "-c", str(path)],
            env={**os.environ, "COLUMNS": str(COLUMNS)},
            stdout=subprocess.DEVNULL,
            stderr=follower,
            check=False,
        )
        os.close(follower)
        text = os.read(leader, 10_000).decode().replace("\r\n", "\n")
    finally:
        os.close(leader)
    assert done.returncode == 2
    assert "sources.crm" in text
    assert max(len(line) for line in text.splitlines()) <= COLUMNS


def completed(folder: Path, words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "ingestd"],
        cwd=folder,
        env={
            **os.environ,
            "_INGESTD_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(shlex.split(words)) - (not words.endswith(" "))),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_a_shell_completes_commands_sources_and_tables(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(CONFIG)
    (tmp_path / "lake/shop/public/Big_x0020_One/_delta_log").mkdir(parents=True)
    (tmp_path / "lake/shop/_ref/public").mkdir(parents=True)
    assert completed(tmp_path, "ingestd sn") == ["snapshot"]
    assert completed(tmp_path, "ingestd epochs -c c.toml ") == ["crm", "shop"]
    assert completed(tmp_path, "ingestd epochs ") == []  # no ingestd.toml
    path.rename(tmp_path / "ingestd.toml")
    assert completed(tmp_path, "ingestd drop s") == ["shop"]
    tables = ["public.Big", "One", "public.described", "public.odd"]
    assert completed(tmp_path, "ingestd peek shop public.") == tables
    assert completed(tmp_path, "ingestd peek crm ") == []
    (tmp_path / "ingestd.toml").write_text("not TOML")
    assert completed(tmp_path, "ingestd drop s") == []

"""The command line as a process: its errors, on a terminal too, and what a shell completes."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status", "extra"], "Got unexpected extra argument(s) (extra)\n  remedy: see `{} status"),
        (["snapshot", "shop"], "Missing argument 'TABLE'.\n  remedy: see `{} snapshot"),
        (["--nope"], "No such option: --nope\n  remedy: see `{}"),
        (["run", "-c"], "Option '-c' requires an argument.\n  remedy: see `{}"),
        (
            ["peek", "postgresql://u:hunter2@h/x"],
            "Missing argument 'TABLE'.\n  remedy: see `{} peek",
        ),
        (["check", "postgresql://u:hunter2@h/x"], "Got unexpected extra argument(s) (postgresql:"),
        (["init"], "input is required, but stdin is closed\n  remedy: give --dsn, and"),
    ],
)
def test_wrong_usage_is_reported_in_two_lines_cause_first(words: list[str], said: str) -> None:
    """By the real command: a test runner bypasses the code that reports it."""
    command = [sys.executable, "-m", "ingestd", *words]
    found = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    told = found.stderr.lstrip("\n")
    assert told.startswith(f"ingestd: {said.format('ingestd')}")
    assert len(told.splitlines()) == 2
    assert "hunter2" not in told


def test_no_command_at_all_is_given_the_help() -> None:
    command = [sys.executable, "-m", "ingestd"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, "Usage: ingestd" in found.stderr + found.stdout) == (2, True)


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

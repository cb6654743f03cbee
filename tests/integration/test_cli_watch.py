"""`ingestd status --watch` on a terminal and off one, and what `check --json` says."""

from __future__ import annotations

import json
import os
import pty
import re
import selectors
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from ingestd import cli
from ingestd.testing.embedded.daemon import module_environment
from tests.harness.config import wal_config

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness.databases import Database

LIMIT_S = 60.0


@pytest.fixture
def config(database: Database, tmp_path: Path, lake: Path) -> Path:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)", "CREATE TABLE keyless (id int)")
    names = f'slot = "{database.name}"\npublication = "{database.name}"'
    path = tmp_path / "c.toml"
    off = '[http]\nlisten = "off"\n'
    path.write_text(wal_config(lake=lake, dsn=database.dsn, source_extra=names, extra=off))
    return path


def watched(config: Path, arguments: list[str], output: int, source: int, until: str) -> str:
    """Watch until its output has `until`, then press Ctrl-C; its exit code has to be 0."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ingestd", "status", "-c", str(config), "--watch", *arguments],
        env={**module_environment(), "COLUMNS": "80", "LINES": "40", "TERM": "xterm"},
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(output)
    text = ""
    ends = time.monotonic() + LIMIT_S
    try:
        with selectors.DefaultSelector() as ready:
            ready.register(source, selectors.EVENT_READ)
            while not re.search(until, text, re.DOTALL) and time.monotonic() < ends:
                if ready.select(1):
                    text += os.read(source, 10_000).decode()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        os.close(source)
    assert re.search(until, text, re.DOTALL), text + errors
    assert (process.returncode, errors) == (0, "")
    return text


def test_on_a_terminal_it_is_drawn_in_its_place(config: Path) -> None:
    source, output = pty.openpty()
    text = watched(config, ["0.2"], output, source, r"last at .*last at .*last at")
    assert "\x1b[1A" in text  # up again, to where it began
    assert "every 0.2 s" in text


def test_elsewhere_one_block_follows_the_other(config: Path) -> None:
    source, output = os.pipe()
    text = watched(config, ["0.2"], output, source, r"shop +closed.*shop +closed.*\n\n")
    assert "\x1b" not in text
    assert text.startswith('http.listen is "off"')
    assert text.split("\n\n")[1].startswith('http.listen is "off"')


def test_as_json_each_is_a_line(config: Path) -> None:
    source, output = os.pipe()
    text = watched(config, ["200ms", "--json"], output, source, r"\n.*\n")
    first, second = (json.loads(line) for line in text.splitlines()[:2])
    assert first["sources"].keys() == second["sources"].keys() == {"shop"}


def test_a_check_as_json(config: Path) -> None:
    done = CliRunner().invoke(cli.app, ["check", "-c", str(config), "--json"])
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert document["failed"] == 1
    [failed] = [line for line in document["checks"] if line["level"] == "fail"]
    assert (failed["source"], failed["subject"]) == ("shop", "table public.keyless")
    assert "REPLICA IDENTITY FULL" in failed["remedy"]

"""What a terminal would obey is in no output, whatever tables are called."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime

import pytest
import typer
from rich.console import Console

from ingestd.app.verify_report import VerifyReport
from ingestd.cli.errors import reporting
from ingestd.config.redaction import Redactor
from ingestd.model.check import CheckLine
from ingestd.model.errors import OperatorError
from ingestd.model.lake_state import TableState
from ingestd.model.lsn import Lsn
from ingestd.model.printable_text import printable, printable_lines
from ingestd.observe.status import DaemonStatus, SourceStatus, TableStatus
from ingestd.observe.status_json import to_json
from ingestd.ports.verify import VerifyOutcome, VerifyState
from ingestd.terminal.check import print_checks
from ingestd.terminal.echo import echo, echo_json
from ingestd.terminal.status import print_status
from tests.harness.source_code import modules

NAME = "a\x1b]0;title\x07\x1b[2J\r\nok    shop  all is well\x9b31m"
ONE_LINE = NAME.replace("\n", "")
OBEYED = set("\x1b\x07\r\x9b")
T0 = datetime(2026, 1, 2, tzinfo=UTC)


def assert_plain(printed: str) -> None:
    assert "title" in printed
    assert not OBEYED & set(printed)
    assert not [line for line in printed.splitlines() if line.startswith("ok")]


def test_printable_keeps_what_can_be_read() -> None:
    assert printable("Ünï \N{SNOWMAN} x") == "Ünï \N{SNOWMAN} x"
    assert printable("a\tb\nc\u2028d\u202ee") == "a b c d e"
    assert printable_lines("one\n  two\x1b") == "one\n  two "


def test_printable_keeps_the_spaces_of_a_name() -> None:
    assert printable("a\u00a0b\u3000c\u2028d") == "a\u00a0b\u3000c d"


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    print_checks([CheckLine("shop", f"table {NAME}", "fail", NAME, "do\nthis")], Redactor())
    printed = capsys.readouterr().out
    assert_plain(printed)
    assert printed.splitlines()[1:3] == ["        do", "        this"]


def test_status() -> None:
    shop = SourceStatus("shop", T0)
    shop.tables["public.a"] = TableStatus(
        f"public.{NAME}", TableState.STOPPED, T0, reason=ONE_LINE, remedy=ONE_LINE
    )
    printed = io.StringIO()
    print_status(to_json(DaemonStatus("0.1.0", T0, {"shop": shop})), Console(file=printed))
    assert_plain(printed.getvalue())


def test_verify() -> None:
    outcome = VerifyOutcome(f"public.{NAME}", VerifyState.EQUAL, source_rows=1, lake_rows=1)
    assert_plain("\n".join(VerifyReport("shop", Lsn(1), [outcome]).lines()))


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), reporting(debug=False):
        raise OperatorError(ONE_LINE, remedy="two\n  lines")
    printed = capsys.readouterr().err
    assert_plain(printed)
    assert printed.endswith("\n  remedy: two\n  lines\n")


def test_texts_and_documents(capsys: pytest.CaptureFixture[str]) -> None:
    echo(ONE_LINE)
    assert_plain(capsys.readouterr().out)
    echo(ONE_LINE, err=True)
    assert_plain(capsys.readouterr().err)
    echo_json({NAME: [NAME, "Ünï \N{SNOWMAN}", "\U000e0001\u202e"]})
    printed = capsys.readouterr().out
    assert_plain(printed)
    assert "\N{SNOWMAN}" in printed
    assert "\u202e" not in printed
    assert json.loads(printed) == {NAME: [NAME, "Ünï \N{SNOWMAN}", "\U000e0001\u202e"]}


def test_commands_print_in_no_other_way() -> None:
    """Except errors, tables and progress, which are made printable where they are made."""
    found = [
        str(path)
        for path in modules("ingestd/cli")
        if "typer.echo" in path.read_text("utf-8") or "\nprint(" in path.read_text("utf-8")
    ]
    assert found == []

"""The command line as far as it goes without a database."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from typer import Exit
from typer.testing import CliRunner

from ingestd import cli, status_table
from ingestd.checks import CheckLine
from ingestd.errors import (
    ConfigError,
    IngestdError,
    OperatorError,
    ProtocolError,
    TransientError,
)
from ingestd.redaction import Redactor

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
[lake]
uri = "./lake"
[http]
listen = "off"
[sources.shop]
kind = "wal"
dsn = "postgresql://u:hunter2@127.0.0.1/shop"
tabels = ["public.*"]
"""


def test_help_names_the_commands() -> None:
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    for command in ("run", "check", "status", "demo"):
        assert f"  {command} " in result.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['ingestd', '--help']\n"
        "from ingestd.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as done:\n    assert not done.code\n"
        "heavy = {'pyarrow', 'deltalake', 'psycopg', 'pydantic', 'numpy', 'aiohttp'}\n"
        "sys.stderr.write(repr(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set()"


@pytest.mark.parametrize("args", [["run"], ["check", "--no-such"], ["fly"], ["demo", "--seconds"]])
def test_wrong_usage_is_2(args: list[str]) -> None:
    assert CliRunner().invoke(cli.app, args).exit_code == 2


def test_a_wrong_config_is_2_and_told_in_words(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(CONFIG)
    result = CliRunner().invoke(cli.app, ["status", "--config", str(path)])
    assert result.exit_code == 2
    assert result.stderr == "ingestd: sources.shop.tabels: unknown key; did you mean 'tables'?\n"


def test_a_missing_config_is_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["status", "-c", str(tmp_path / "none.toml")])
    assert result.exit_code == 2
    assert "none.toml: the config file can't be read: No such file or directory" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (OperatorError("x"), 1),
        (ProtocolError("x"), 1),
        (TransientError("x", reason="connection"), 75),
    ],
)
def test_exit_codes(error: IngestdError, code: int) -> None:
    assert cli.exit_code(error) == code


def test_errors_are_cause_then_remedy_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exit) as done, cli.reporting(debug=False):
        raise OperatorError("refused: password=hunter2", remedy="ALTER ROLE u PASSWORD ...")
    assert done.value.exit_code == 1
    assert capsys.readouterr().err == (
        "ingestd: refused: password=***\n  remedy: ALTER ROLE u PASSWORD ...\n"
    )


def test_errors_never_show_a_secret_of_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(CONFIG.replace("tabels", "tables"))
    with pytest.raises(Exit), cli.reporting(debug=False, config=path):
        raise OperatorError("the server quoted hunter2")
    assert capsys.readouterr().err == "ingestd: the server quoted ***\n"


def test_debug_lets_the_traceback_through() -> None:
    with pytest.raises(OperatorError), cli.reporting(debug=True):
        raise OperatorError("x")


def test_an_unexpected_fault_is_two_lines_without_its_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        dict[str, str]()["hunter2"]
    except KeyError as error:
        cli.report_unexpected(KeyError, error, error.__traceback__)
    text = capsys.readouterr().err
    assert text.startswith("ingestd: unexpected KeyError in test_cli.py, line ")
    assert text.count("\n") == 2
    assert "hunter2" not in text


def test_checks_are_printed_with_their_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    sql = "ALTER TABLE public.orders ADD PRIMARY KEY (id); -- " + "long " * 40
    cli.print_checks(
        [
            CheckLine("", "lake", "ok", "lake sesame"),
            CheckLine("shop", "wal_level", "warn", "[bold]logical"),
            CheckLine("shop", "table public.orders", "fail", "no key", f"-- one of\n{sql}"),
        ],
        Redactor(["sesame"]),
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ok", "lake", "lake", "***"]
    assert lines[1].endswith("[bold]logical")
    assert lines[2].split() == ["fail", "shop", "table", "public.orders", "no", "key"]
    assert lines[3:5] == ["        -- one of", f"        {sql}"]
    assert lines[5] == "3 checks: 1 failed, 1 with a warning"


def test_a_status_is_a_table_with_faults_below(capsys: pytest.CaptureFixture[str]) -> None:
    source = {
        "state": "stopped",
        "reason": "slot [x] is gone",
        "remedy": "SELECT pg_create_logical_replication_slot('ingestd_shop', 'pgoutput')",
        "tables": [
            {"table": "public.a", "state": "live", "reason": None, "remedy": None},
            {"table": "public.b", "state": "stopped", "reason": "no key", "remedy": None},
        ],
        "lag_bytes": 1_500_000,
        "lag_seconds": None,
        "epoch": 12,
        "rows": 34,
        "freshness_p50_seconds": 0.5,
        "freshness_p99_seconds": 0.75,
        "last_commit": None,
    }
    status = {"version": "0.1.0", "started_at": None, "sources": {"shop": source}}
    status_table.print_status(status)
    text = capsys.readouterr().out
    for shown in ("shop", "1/2 live", "1.5 MB", "0.75s"):
        assert shown in text
    assert "source shop is stopped: slot [x] is gone\n" in text
    assert f"  remedy: {source['remedy']}\n" in text
    assert "source shop, table public.b is stopped: no key\n" in text

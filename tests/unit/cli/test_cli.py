"""The command line as far as it goes without a database."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from typer import Exit
from typer.testing import CliRunner

from ingestd import cli
from ingestd.config.redaction import Redactor
from ingestd.config.units import Address
from ingestd.http.server import HttpServer
from ingestd.model.check import CheckLine
from ingestd.model.errors import (
    ConfigError,
    IngestdError,
    OperatorError,
    ProtocolError,
    TransientError,
)
from ingestd.model.lake_state import TableState
from ingestd.model.lsn import Lsn
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import (
    DaemonStatus,
    SnapshotOutcome,
    SourceState,
    SourceStatus,
)
from ingestd.observe.status_json import to_json
from ingestd.terminal import status as status_table
from ingestd.terminal.check import print_checks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typer.testing import Result

    from ingestd.model.schema import TableId

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
    for command in ("run", "check", "status", "tables", "snapshot", "demo"):
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


@pytest.mark.parametrize(
    "args", [["run", "x"], ["check", "--no-such"], ["fly"], ["demo", "--seconds"]]
)
def test_wrong_usage_is_2(args: list[str]) -> None:
    assert CliRunner().invoke(cli.app, args).exit_code == 2


def test_a_wrong_config_exits_2_with_an_explanation(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(CONFIG)
    result = CliRunner().invoke(cli.app, ["status", "--config", str(path)])
    assert result.exit_code == 2
    assert result.stderr == "ingestd: sources.shop.tabels: unknown key; did you mean 'tables'?\n"


def test_a_missing_config_is_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["status", "-c", str(tmp_path / "none.toml")])
    assert result.exit_code == 2
    assert "none.toml: the config file can't be read: No such file or directory" in result.stderr
    assert "remedy: `ingestd init` creates one" in result.stderr


@pytest.mark.parametrize(
    "words", [["status"], ["run"], ["pause", "shop"], ["snapshot", "shop", "public.orders"]]
)
def test_the_config_in_the_folder_is_taken_if_none_is_named(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ingestd.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, words)
    assert (result.exit_code, result.stderr) == (
        2,
        "ingestd: sources.shop.tabels: unknown key; did you mean 'tables'?\n",
    )


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


def test_debug_shows_the_traceback_without_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(CONFIG.replace("tabels", "tables"))
    with pytest.raises(Exit) as done, cli.reporting(debug=True, config=path):
        raise OperatorError("the server quoted hunter2")
    assert done.value.exit_code == 1
    shown = capsys.readouterr().err
    assert "OperatorError: the server quoted ***" in shown
    assert "Traceback" in shown
    assert "hunter2" not in shown


@pytest.mark.parametrize("named", [["-c", "ingestd.toml"], []])
@pytest.mark.parametrize("command", ["pause", "resume"])
def test_a_secret_is_hidden_whether_the_config_is_named_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, named: list[str]
) -> None:
    (tmp_path / "hunter2-file").write_text("stands where a folder should be")
    text = CONFIG.replace("tabels", "tables")
    text = re.sub(r"uri = .*", 'uri = "env:SECRET_LAKE"', text)
    (tmp_path / "ingestd.toml").write_text(text)
    monkeypatch.setenv("SECRET_LAKE", str(tmp_path / "hunter2-file" / "lake"))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, [command, "shop", *named])
    assert result.exit_code == 1
    assert "***" in result.stderr
    assert "hunter2" not in result.stderr


@pytest.mark.parametrize("written", [["-c", "FILE"], ["--config", "FILE"], ["--config=FILE"], []])
def test_debug_shows_an_unexpected_traceback_without_secrets(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    written: list[str],
) -> None:
    path = tmp_path / "ingestd.toml"
    path.write_text(CONFIG.replace("tabels", "tables"))
    monkeypatch.chdir(tmp_path)
    words = [word.replace("FILE", str(path)) for word in written]
    monkeypatch.setattr(sys, "argv", ["ingestd", "run", "--debug", *words])
    error = RuntimeError("a driver quoted hunter2")
    cli.report_unexpected(RuntimeError, error, None)
    shown = capsys.readouterr().err
    assert shown == "RuntimeError: a driver quoted ***\n"


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
    print_checks(
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


def table(name: str, state: str, reason: str | None = None) -> dict[str, object]:
    shown = {"table": name, "state": state, "reason": reason, "remedy": None}
    return {**shown, "snapshot": None, "snapshot_requested": False, "last_snapshot": None}


def test_a_status_is_a_table_with_faults_below(capsys: pytest.CaptureFixture[str]) -> None:
    source = {
        "state": "stopped",
        "reason": "slot [x] is gone",
        "remedy": "SELECT pg_create_logical_replication_slot('ingestd_shop', 'pgoutput')",
        "tables": [
            table("public.a", "live"),
            table("public.b", "stopped", "no key"),
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


# --- snapshot --------------------------------------------------------------------------------

T0 = datetime(2026, 1, 2, tzinfo=UTC)
CLAIM = "slot 'ingestd_shop', database shop at 127.0.0.1"
CONFIG_ON = CONFIG.replace("tabels", "tables")


class Shop:
    """A daemon's HTTP side, with a source `shop` that reads tables at once when asked to."""

    def __init__(self) -> None:
        self.source = SourceStatus("shop", T0, claim=CLAIM)
        self.source.enter(SourceState.STREAMING, T0)
        self.source.table("public.orders", TableState.LIVE, T0)
        status = DaemonStatus("0", T0, {"shop": self.source}, lake="./lake")
        self.asked: list[str] = []
        self.cancelled: list[str] = []
        self.is_slow = False
        self.error: IngestdError | None = None
        self.server = HttpServer(Address("127.0.0.1", 0), Metrics(), status, Redactor(), self)

    def request_snapshot(
        self, source: str, tables: Sequence[TableId], where: str | None = None
    ) -> None:
        if self.error is not None:
            raise self.error
        for table in tables:
            found = self.source.tables[str(table)]
            self.asked.append(f"{source} {table}" if where is None else f"{source} {table} {where}")
            if self.is_slow:
                found.snapshot_requested = True
            elif where is None:
                found.snapshot_lsn = Lsn(len(self.asked))
            else:
                found.end_snapshot(SnapshotOutcome.DONE, T0)

    def cancel_snapshot(self, source: str, tables: Sequence[TableId]) -> None:
        if self.error is not None:
            raise self.error
        self.cancelled += [f"{source} {table}" for table in tables]


async def invoke(*args: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, cli.app, ["snapshot", *args])


def config_at(tmp_path: Path, listen: str, source: str = "shop") -> str:
    path = tmp_path / "c.toml"
    path.write_text(CONFIG_ON.replace('"off"', f'"{listen}"').replace(".shop]", f".{source}]"))
    return str(path)


@pytest.mark.parametrize(
    "args",
    [
        ["shop"],
        ["shop", "public.orders"],
        ["shop", "public.orders", "--config", "c.toml", "--url", "http://127.0.0.1:1"],
        ["shop", "public.orders", "--url", "ftp://127.0.0.1:1"],
        ["shop", "public.orders", "--url", "http://127.0.0.1:1", "--limit", "soon"],
        ["shop", "public.orders", "--url", "http://127.0.0.1:1", "--cancel", "--where", "true"],
        ["shop", "orders", "--url", "http://127.0.0.1:1"],
    ],
)
def test_a_wrong_request_is_2(args: list[str]) -> None:
    result = CliRunner().invoke(cli.app, ["snapshot", *args])
    assert result.exit_code == 2
    assert result.stderr


async def test_a_snapshot_is_asked_for_at_a_url(tmp_path: Path) -> None:
    shop = Shop()
    async with shop.server as server:
        url = f"http://{server.address}"
        result = await invoke("shop", "public.orders", "--url", url, "--no-wait")
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout == (
            "source shop: requested a new snapshot of public.orders\n"
            f"  follow it with: curl {url}/status\n"
        )
        config = config_at(tmp_path, str(server.address))
        result = await invoke("shop", "public.orders", "-c", config, "--no-wait")
        assert (result.exit_code, result.stderr) == (0, "")
        assert f"ingestd status -c {config}\n" in result.stdout
        result = await invoke("shop", "public.orders", "-c", config)
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.splitlines()[1:] == ["  public.orders: live"]
    assert shop.asked == ["shop public.orders"] * 3


async def test_only_some_rows_are_asked_for() -> None:
    shop = Shop()
    async with shop.server as server:
        url = f"http://{server.address}"
        result = await invoke("shop", "public.orders", "--url", url, "--where", "id > 7")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "source shop: requested the rows where id > 7 of public.orders",
        "  public.orders: live",
    ]
    assert shop.asked == ["shop public.orders id > 7"]


async def test_a_snapshot_is_cancelled() -> None:
    shop = Shop()
    async with shop.server as server:
        url = f"http://{server.address}"
        result = await invoke("shop", "public.orders", "--url", url, "--cancel")
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout == "source shop: cancelled the snapshot of public.orders\n"
        assert (shop.asked, shop.cancelled) == ([], ["shop public.orders"])
        shop.error = OperatorError("table public.orders: no snapshot is under way")
        result = await invoke("shop", "public.orders", "--url", url, "--cancel")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "ingestd: table public.orders: no snapshot is under way\n"


async def test_ctrl_c_leaves_the_snapshot_running_and_explains_cancel(tmp_path: Path) -> None:
    shop = Shop()
    shop.is_slow = True
    async with shop.server as server:
        config = config_at(tmp_path, str(server.address))
        command = [sys.executable, "-m", "ingestd", "snapshot", "shop", "public.orders"]
        process = await asyncio.create_subprocess_exec(
            *command,
            "-c",
            config,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        asked = await process.stdout.readline()
        assert asked == b"source shop: requested a new snapshot of public.orders\n"
        assert await process.stdout.readline() == b"  public.orders: waiting for its snapshot\n"
        process.send_signal(signal.SIGINT)
        rest, errors = await process.communicate()
    assert (process.returncode, errors) == (130, b"")
    assert rest.decode().splitlines() == [
        f"the daemon continues the snapshot; follow it with: ingestd status -c {config}",
        f"  or cancel it with: ingestd snapshot --cancel shop public.orders -c {config}",
    ]
    assert (shop.asked, shop.cancelled) == (["shop public.orders"], [])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OperatorError("table public.order is not captured", remedy="did you mean it?"), 1),
        (TransientError("source shop is backing_off: gone", reason="x", remedy="wait"), 75),
    ],
)
async def test_a_refused_request_says_why(error: IngestdError, code: int) -> None:
    shop = Shop()
    shop.error = error
    async with shop.server as server:
        result = await invoke("shop", "public.orders", "--url", f"http://{server.address}")
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr == f"ingestd: {error.what}\n  remedy: {error.remedy}\n"


async def test_an_unknown_source_is_2() -> None:
    async with Shop().server as server:
        result = await invoke("shpo", "public.orders", "--url", f"http://{server.address}")
    assert result.exit_code == 2
    assert result.stderr == "ingestd: sources.shpo: no such source; there is shop\n"


async def test_another_daemon_on_the_port_is_named(tmp_path: Path) -> None:
    shop = Shop()
    async with shop.server as server:
        address = server.address
        config = config_at(tmp_path, str(address), source="crm")
        result = await invoke("crm", "public.orders", "-c", config)
    assert (result.exit_code, shop.asked) == (1, [])
    assert f"another daemon listens on {address}: its sources are shop" in result.stderr


def test_a_daemon_that_listens_nowhere_cannot_be_asked(tmp_path: Path) -> None:
    config = config_at(tmp_path, "off")
    result = CliRunner().invoke(cli.app, ["snapshot", "shop", "public.orders", "-c", config])
    assert result.exit_code == 1
    assert 'http.listen is "off"' in result.stderr
    assert 'listen = "127.0.0.1:9464"' in result.stderr


def test_no_daemon_is_named_with_its_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
    config = config_at(tmp_path, address)
    result = CliRunner().invoke(cli.app, ["snapshot", "shop", "public.orders", "-c", config])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"ingestd: no ingestd daemon answers on {address}\n")


@pytest.mark.parametrize("more", [[], ["--cancel"]])
def test_an_unknown_source_is_reported_before_a_missing_daemon(
    tmp_path: Path, more: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
    config = config_at(tmp_path, address)
    words = ["snapshot", "nosuch", "public.orders", "-c", config, *more]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2
    assert result.stderr == "ingestd: sources.nosuch: no such source; there is shop\n"


def test_snapshots_under_way_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shop = SourceStatus("shop", T0)
    shop.table("public.orders", TableState.SNAPSHOTTING, T0)
    shop.tables["public.orders"].read(0.421, 100, T0)
    shop.table("public.items", TableState.LIVE, T0)
    shop.tables["public.items"].snapshot_requested = True
    shop.table("public.notes", TableState.LIVE, T0)
    failed = OperatorError("no column x", remedy="look at \\d notes")
    shop.tables["public.notes"].end_snapshot(SnapshotOutcome.FAILED, T0, failed)
    status_table.print_status(to_json(DaemonStatus("0", T0, {"shop": shop})))
    text = capsys.readouterr().out
    assert "source shop, table public.orders is snapshotting: 42% read\n" in text
    assert "source shop, table public.items is live: a new snapshot is requested\n" in text
    last = "source shop, table public.notes is live: its last snapshot failed: no column x\n"
    assert f"{last}  remedy: look at \\d notes\n" in text

"""The commands that need a config: what they take, and what they hand it to."""

from __future__ import annotations

import json
import os
import shlex
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ingestd.cli import completion
from ingestd.cli.config_path import daemon_config
from ingestd.cli.daemon import daemon_address, daemon_status, meant_daemon
from ingestd.cli.errors import (
    EXIT_INTERRUPTED,
    EXIT_OPERATOR,
    SEVERITY,
    exit_code,
    load,
    redactor_of,
    reporting,
)
from ingestd.cli.options import (
    AsJson,
    ConfigFile,
    DaemonConfig,
    DaemonUrl,
    Debug,
    SourceName,
    TableNames,
    duration_in,
    known_source,
    size_in,
)
from ingestd.process.fast_imports import sparing
from ingestd.process.memory import give_back_early, keeping_all


def run(
    config: ConfigFile,
    *,
    accept_empty_lake: Annotated[
        list[str] | None,
        typer.Option(
            "--accept-empty-lake",
            metavar="SOURCE",
            help="Begin this source in the lake that is there, though it was written to another "
            "one, and read all its tables again; may be repeated. For one start only.",
            autocompletion=completion.sources,
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Capture all configured sources until SIGTERM or SIGINT."""
    # Until the daemon's own handlers are there, nothing is open that would need closing. SIGHUP
    # asks for a config to be read that has not been read yet, if no terminal was closed.
    had_terminal = os.isatty(2)
    signal.signal(
        signal.SIGHUP, lambda *_: os._exit(0) if had_terminal and not os.isatty(2) else None
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    give_back_early()
    with reporting(debug=debug, config=config):
        with keeping_all(), sparing():
            from ingestd.app import daemon  # noqa: PLC0415

        raise typer.Exit(daemon.run(config, frozenset(accept_empty_lake or ())))


def check(config: ConfigFile, *, as_json: AsJson = False, debug: Debug = False) -> None:
    """Tell what would fail before it fails, each with its remedy."""
    with reporting(debug=debug, config=config):
        from ingestd.app import check as checking  # noqa: PLC0415

        lines = checking.check(config)
        redactor = redactor_of(config)
    from ingestd.terminal.check import checks_to_json, print_checks  # noqa: PLC0415

    if as_json:
        typer.echo(json.dumps(redactor.tree(checks_to_json(lines)), indent=2))
    else:
        print_checks(lines, redactor)
    if any(line.level == "fail" for line in lines):
        raise typer.Exit(EXIT_OPERATOR)


def snapshot(
    source: SourceName,
    tables: TableNames,
    *,
    config: DaemonConfig = None,
    url: DaemonUrl = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="SQL",
            help="Read only the rows that this holds for; name what is not in pg_catalog with its "
            "schema.",
        ),
    ] = None,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Give up their snapshots instead; the old rows stay.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Watch until the rows are in the lake.")
    ] = True,
    limit: Annotated[
        str, typer.Option("--limit", metavar="DURATION", help="How long to watch at most.")
    ] = "1d",
    debug: Debug = False,
) -> None:
    """Have the running daemon read tables anew. Meanwhile the old rows serve."""
    limit_s = duration_in(limit, "--limit")
    if cancel and where is not None:
        msg = "a snapshot is cancelled whole: leave --where out"
        raise typer.BadParameter(msg, param_hint="--cancel")
    config = daemon_config(config, url)
    with reporting(debug=debug, config=config):
        loaded = None if config is None else load(config)
        if loaded is not None:
            known_source(loaded, source)  # that is so whether the daemon runs or not
        address = daemon_address(config, url)
        from ingestd.cli.commands.snapshot import SnapshotCommand  # noqa: PLC0415

        meant = None if loaded is None else meant_daemon(loaded)
        daemon = shlex.join(["--url", str(url)] if config is None else ["-c", str(config)])
        command = SnapshotCommand(address, source, tables, meant, daemon)
        if cancel:
            command.cancel()
        else:
            raise typer.Exit(command.ask(where, limit_s if wait else None))


def tables(
    config: ConfigFile,
    *,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="One source; all if not given.",
            autocompletion=completion.sources,
        ),
    ] = None,
    schema: Annotated[
        str | None, typer.Option("--schema", metavar="NAME", help="The tables of one schema.")
    ] = None,
    columns: Annotated[bool, typer.Option("--columns", help="Show the columns too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, columns and all.")] = False,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="DURATION", help="How long to wait for a database.")
    ] = "10s",
    debug: Debug = False,
) -> None:
    """Show tables and columns: what is captured, or why not."""
    timeout_s = duration_in(timeout, "--timeout")
    with reporting(debug=debug, config=config):
        from ingestd.app import tables as listing  # noqa: PLC0415

        running, _ = daemon_status(config)
        found, faults = listing.tables(
            config,
            [] if source is None else [source],
            schema=schema,
            timeout_s=timeout_s,
            running=running,
        )
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        from ingestd.terminal.tables import print_tables  # noqa: PLC0415

        print_tables(found, columns=columns)
    for fault in faults:
        with reporting(debug=debug, config=config), suppress(typer.Exit):
            raise fault
    if faults:
        raise typer.Exit(max(map(exit_code, faults), key=SEVERITY.index))


def verify(
    source: SourceName,
    tables: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TABLE",
            help="As schema.table, or patterns; all if not given.",
            autocompletion=completion.tables,
        ),
    ] = None,
    *,
    config: ConfigFile,
    wait: Annotated[
        str, typer.Option("--wait", metavar="DURATION", help="How long the lake may take.")
    ] = "5m",
    limit_rate: Annotated[
        str | None,
        typer.Option("--limit-rate", metavar="SIZE/s", help="Read no faster from the source."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="For what is compared; or limits.memory."),
    ] = None,
    show: Annotated[
        int, typer.Option("--show", min=0, help="How many differences of a table to print.")
    ] = 20,
    values: Annotated[
        bool, typer.Option("--values", help="Print the values that differ, too.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare a source with the lake, row by row. Changes nothing."""
    wait_s = duration_in(wait, "--wait")
    rate = None if limit_rate is None else size_in(limit_rate.removesuffix("/s"), "--limit-rate")
    memory_bytes = None if memory is None else size_in(memory, "--memory")
    give_back_early()
    with reporting(debug=debug, config=config):
        from ingestd.app import verify as verifying  # noqa: PLC0415
        from ingestd.terminal.verify import verify_progress  # noqa: PLC0415

        try:
            with verify_progress() as progress:
                found = verifying.verify(
                    config,
                    source,
                    tables or [],
                    wait_s=wait_s,
                    memory_bytes=memory_bytes,
                    rate_bytes_per_s=rate,
                    shown=show,
                    with_values=values,
                    progress=progress,
                )
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        redactor = redactor_of(config)
    if as_json:
        typer.echo(json.dumps(redactor.tree(found.to_json()), indent=2))
    else:
        typer.echo(redactor.text("\n".join(found.lines())))
    raise typer.Exit(found.exit_code)


def demo(
    *,
    seconds: Annotated[int, typer.Option(min=5, help="How long to watch the daemon.")] = 30,
    path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to put it: ./demo-lake if not given.")
    ] = None,
    spark: Annotated[bool, typer.Option(help="End with a look through PySpark.")] = True,
    keep: Annotated[bool, typer.Option("--keep", help="Leave it running until Ctrl-C.")] = False,
    debug: Debug = False,
) -> None:
    """Watch changes arrive in Delta tables, on a Postgres of its own."""
    with reporting(debug=debug):
        from ingestd import demo as shop_demo  # noqa: PLC0415

        raise typer.Exit(shop_demo.main(seconds=seconds, path=path, spark=spark, keep=keep))

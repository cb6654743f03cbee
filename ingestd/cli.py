"""The command line. Everything heavy is imported inside the commands: help comes at once.

Exit codes (design section 5): 0 done, 1 a fault that an operator must fix, 2 wrong usage or
config, 75 a transient fault that was given up on. (130: Ctrl-C ended the watching of a snapshot,
or a verification.)
"""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_command

from ingestd import __version__
from ingestd.allocation import give_back_early
from ingestd.errors import ConfigError, IngestdError, OperatorError, TransientError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from ingestd.config import Config
    from ingestd.observe.client import Endpoint
    from ingestd.redaction import Redactor

EXIT_OPERATOR, EXIT_USAGE, EXIT_TRANSIENT = 1, 2, 75
EXIT_INTERRUPTED = 130
_SEVERITY = (EXIT_TRANSIENT, EXIT_OPERATOR, EXIT_USAGE)
"""Of several faults the last of these is told."""

app = typer.Typer(
    name="ingestd",
    help="Postgres changes into a Delta lake, exactly once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigFile = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", help="The config file (TOML).")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]


def main() -> None:
    """Run the command line: the console script `ingestd`."""
    sys.excepthook = report_unexpected
    get_command(app)(prog_name="ingestd")  # past Typer.__call__, which has an excepthook of its own


def report_unexpected(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Name a fault that is ours in two lines. Its text is left out: it may quote anything.

    With --debug the traceback is printed, without the secrets of the config.
    """
    if "--debug" in sys.argv[1:]:
        _print_trace(error, _config_named(sys.argv[1:]))
        return
    where = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        where = f" in {Path(code.co_filename).name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    sys.stderr.write(f"ingestd: unexpected {kind.__name__}{where}; this is a bug\n")
    sys.stderr.write("  remedy: run it again with --debug and report what it prints\n")


@contextmanager
def reporting(*, debug: bool, config: Path | None = None) -> Iterator[None]:
    """Turn our errors into one to three lines on stderr and the right exit code."""
    try:
        yield
    except IngestdError as error:
        known = None if isinstance(error, ConfigError) else config
        if debug:
            _print_trace(error, known)
            raise typer.Exit(exit_code(error)) from None
        sys.stderr.write(redactor_of(known).text(f"ingestd: {error}") + "\n")
        raise typer.Exit(exit_code(error)) from None


def _config_named(words: Sequence[str]) -> Path | None:
    """Find the config in a command line that nobody else can be asked about any more."""
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        if word in {"--config", "-c"} and following:
            return Path(following)
        if word.startswith("--config="):
            return Path(word.removeprefix("--config="))
    return None


def _print_trace(error: BaseException, config: Path | None) -> None:
    try:
        redactor = redactor_of(config)
    except IngestdError:
        redactor = redactor_of(None)
    sys.stderr.write(redactor.text("".join(format_exception(error))))


def redactor_of(config: Path | None) -> Redactor:
    """Give what takes the config's secrets out of text. Raises ConfigError."""
    if config is not None:
        return _load(config).redactor
    from ingestd.redaction import Redactor  # noqa: PLC0415

    return Redactor()


def _load(config: Path) -> Config:
    from ingestd.capture.settings import SETTINGS  # noqa: PLC0415
    from ingestd.config import load_config  # noqa: PLC0415

    return load_config(config, SETTINGS, os.environ)


def exit_code(error: IngestdError) -> int:
    """Give the exit code of a command that ended with this error."""
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    return EXIT_TRANSIENT if isinstance(error, TransientError) else EXIT_OPERATOR


def _version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"ingestd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=lambda wanted: _version(wanted=wanted), is_eager=True),
    ] = False,
) -> None:
    del version


@app.command()
def run(config: ConfigFile, *, debug: Debug = False) -> None:
    """Capture all configured sources until SIGTERM or SIGINT."""
    # Until the daemon's own handlers are there, nothing is open that would need closing.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    give_back_early()
    with reporting(debug=debug, config=config):
        from ingestd import app as composition  # noqa: PLC0415

        raise typer.Exit(composition.run(config))


@app.command()
def check(config: ConfigFile, *, debug: Debug = False) -> None:
    """Tell what would fail before it fails, each with its remedy."""
    with reporting(debug=debug, config=config):
        from ingestd import app as composition  # noqa: PLC0415

        lines = composition.check(config)
        redactor = redactor_of(config)
    from ingestd.checks_table import print_checks  # noqa: PLC0415

    print_checks(lines, redactor)
    if any(line.level == "fail" for line in lines):
        raise typer.Exit(EXIT_OPERATOR)


@app.command()
def status(
    config: ConfigFile,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Show the running daemon or, if none, what slot and lake tell."""
    with reporting(debug=debug, config=config):
        found = daemon_status(config)
        if found is None:
            from ingestd import app as composition  # noqa: PLC0415

            found = composition.status(config)
    if as_json:
        import json  # noqa: PLC0415

        typer.echo(json.dumps(found, indent=2))
    else:
        from ingestd.status_table import print_status  # noqa: PLC0415

        print_status(found)


@app.command()
def snapshot(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The source's name.")],
    tables: Annotated[list[str], typer.Argument(metavar="TABLE...", help="As schema.table.")],
    *,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="The daemon's config.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="Or where it is, like http://127.0.0.1:9464; its token is in INGESTD_HTTP_TOKEN, "
            "and goes to other machines by https only.",
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="SQL", help="Read only the rows that this holds for."),
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
    """Have the running daemon read tables anew; meanwhile the old rows serve."""
    limit_s = _duration(limit, "--limit")
    if cancel and where is not None:
        msg = "a snapshot is cancelled whole: leave --where out"
        raise typer.BadParameter(msg, param_hint="--cancel")
    with reporting(debug=debug, config=config):
        address = _daemon_address(config, url)
        from ingestd.snapshot_command import SnapshotCommand  # noqa: PLC0415

        sources = None if config is None else set(_load(config).sources)
        daemon = shlex.join(["--url", str(url)] if config is None else ["-c", str(config)])
        command = SnapshotCommand(address, source, tables, sources, daemon)
        if cancel:
            command.cancel()
        else:
            raise typer.Exit(command.ask(where, limit_s if wait else None))


@app.command()
def tables(
    config: ConfigFile,
    *,
    source: Annotated[
        str | None, typer.Argument(metavar="[SOURCE]", help="One source; all if not given.")
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
    """Show schemas, tables and columns, what is captured, and why the rest is not."""
    timeout_s = _duration(timeout, "--timeout")
    with reporting(debug=debug, config=config):
        from ingestd import app as composition  # noqa: PLC0415

        found, faults = composition.tables(
            config,
            [] if source is None else [source],
            schema=schema,
            timeout_s=timeout_s,
            running=daemon_status(config),
        )
    if as_json:
        import json  # noqa: PLC0415

        typer.echo(json.dumps(found, indent=2))
    else:
        from ingestd.table_listing import print_tables  # noqa: PLC0415

        print_tables(found, columns=columns)
    for fault in faults:
        with reporting(debug=debug, config=config), suppress(typer.Exit):
            raise fault
    if faults:
        raise typer.Exit(max(map(exit_code, faults), key=_SEVERITY.index))


@app.command()
def verify(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The source's name.")],
    tables: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE...]", help="As schema.table, or patterns; all if not given."
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Compare a source with the lake, row by row, at one position; change nothing."""
    wait_s = _duration(wait, "--wait")
    rate = None if limit_rate is None else _size(limit_rate.removesuffix("/s"), "--limit-rate")
    memory_bytes = None if memory is None else _size(memory, "--memory")
    give_back_early()
    with reporting(debug=debug, config=config):
        from ingestd import app as composition  # noqa: PLC0415
        from ingestd.verify_display import verify_progress  # noqa: PLC0415

        try:
            with verify_progress() as progress:
                found = composition.verify(
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
        import json  # noqa: PLC0415

        typer.echo(json.dumps(redactor.tree(found.to_json()), indent=2))
    else:
        typer.echo(redactor.text("\n".join(found.lines())))
    raise typer.Exit(found.exit_code)


def _size(text: str, option: str) -> int:
    from ingestd.quantities import size_bytes  # noqa: PLC0415

    try:
        return size_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _duration(text: str, option: str) -> float:
    from ingestd.quantities import seconds  # noqa: PLC0415

    try:
        return seconds(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _daemon_address(config: Path | None, url: str | None) -> Endpoint:
    """Say where the daemon listens. Raises ConfigError, OperatorError."""
    from ingestd.observe.client import endpoint_in, endpoint_of  # noqa: PLC0415

    if (config is None) == (url is None):
        msg = "give either --config FILE or --url URL"
        raise typer.BadParameter(msg)
    if url is not None:
        try:
            return endpoint_of(url, os.environ.get("INGESTD_HTTP_TOKEN"))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--url") from error
    assert config is not None
    listen = endpoint_in(_load(config).http)
    if listen is None:
        raise OperatorError(
            f'http.listen is "off" in {config}: the daemon can\'t be asked for anything',
            remedy='set listen = "127.0.0.1:9464" in [http] and start it anew',
        )
    return listen


@app.command()
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
    """Watch real Postgres changes arrive in Delta tables, on a Postgres of its own."""
    with reporting(debug=debug):
        from ingestd import demo as shop_demo  # noqa: PLC0415

        raise typer.Exit(shop_demo.main(seconds=seconds, path=path, spark=spark, keep=keep))


def daemon_status(config: Path) -> dict[str, Any] | None:
    """Ask the daemon that listens where the config says; None if it is not there or another's.

    Raises ConfigError, OperatorError.
    """
    from ingestd.observe.client import endpoint_in, fetch_status  # noqa: PLC0415

    loaded = _load(config)
    listen = endpoint_in(loaded.http)
    if listen is None:
        return None
    found = fetch_status(listen)
    if found is None or set(found["sources"]) != set(loaded.sources):
        return None
    return found

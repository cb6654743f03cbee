"""Error reports of commands: one to three lines on stderr, and the exit code."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, Any, cast

import typer

from ingestd.cli.config_path import DEFAULT_CONFIG
from ingestd.model.errors import ConfigError, IngestdError, TransientError
from ingestd.model.printable_text import printable_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from ingestd.config import Config
    from ingestd.config.redaction import Redactor

EXIT_OPERATOR, EXIT_USAGE, EXIT_TRANSIENT = 1, 2, 75
EXIT_INTERRUPTED = 130
SEVERITY = (EXIT_TRANSIENT, EXIT_OPERATOR, EXIT_USAGE)
"""Exit codes by ascending severity: of several errors, the most severe decides."""
USAGE_ERROR = cast("type[Exception]", typer.BadParameter.__base__)
"""Click's UsageError, from typer's bundled copy of click."""
_PASTED = re.compile(r"^  remedy: .*(;|ingestd )|^   ")


def report_unexpected(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report a bug in two lines, without the exception's text, which may contain secrets.

    With --debug, print the traceback with the config's secrets redacted.
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
    sys.stderr.write("  remedy: run the command again with --debug and report its output\n")


def report_usage(error: Any) -> int:  # noqa: ANN401 - see USAGE_ERROR
    """Report a usage error in two lines; return the exit code.

    A command line without a command prints the help instead.
    """
    text, context = redactor_of(None).text(error.format_message()), error.ctx
    if context is not None and text == context.get_help():
        error.show()
        return EXIT_USAGE
    command = "ingestd" if context is None else context.command_path
    sys.stderr.write(f"ingestd: {printable_lines(text)}\n  remedy: see `{command} --help`\n")
    return EXIT_USAGE


@contextmanager
def reporting(*, debug: bool, config: Path | None = None, unasked: str = "--yes") -> Iterator[None]:
    """Turn our errors into one to three lines on stderr and the right exit code.

    `unasked`: the options with which the command prompts for nothing.
    """
    try:
        yield
    except typer.Abort as error:
        if not isinstance(error.__context__, EOFError):
            raise  # by Ctrl-C
        sys.stderr.write("\ningestd: input is required, but stdin is closed\n")
        sys.stderr.write(f"  remedy: give {unasked}\n")
        raise typer.Exit(EXIT_USAGE) from None
    except IngestdError as error:
        known = None if isinstance(error, ConfigError) else config
        if debug:
            _print_trace(error, known)
            raise typer.Exit(exit_code(error)) from None
        text = printable_lines(redactor_of(known).text(f"ingestd: {error}"))
        sys.stderr.write(_readable(text) + "\n")
        raise typer.Exit(exit_code(error)) from None


def _readable(text: str) -> str:
    """Return an error's text, wrapped between words if stderr is a terminal."""
    if not sys.stderr.isatty():
        return text
    return wrapped(text, shutil.get_terminal_size().columns)


def wrapped(text: str, width: int) -> str:
    """Wrap prose; lines with SQL and commands are not wrapped, so that they can be pasted."""
    lines = []
    for line in text.splitlines():
        if _PASTED.search(line):
            lines.append(line)
        else:
            indent = " " * (len(line) - len(line.lstrip()) + 2)
            lines += textwrap.wrap(
                line,
                width,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            ) or [""]
    return "\n".join(lines)


def _config_named(words: Sequence[str]) -> Path:
    """Return the config named on the command line, for errors that escaped the parser."""
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        if word in {"--config", "-c"} and following:
            return Path(following)
        if word.startswith("--config="):
            return Path(word.removeprefix("--config="))
    return DEFAULT_CONFIG


def _print_trace(error: BaseException, config: Path | None) -> None:
    try:
        redactor = redactor_of(config)
    except IngestdError:
        redactor = redactor_of(None)
    sys.stderr.write(redactor.text("".join(format_exception(error))))


def redactor_of(config: Path | None) -> Redactor:
    """Return the redactor of the config's secrets. Raises ConfigError."""
    if config is not None:
        return load(config).redactor
    from ingestd.config.redaction import Redactor  # noqa: PLC0415

    return Redactor()


def load(config: Path) -> Config:
    """Read the config. Raises ConfigError."""
    from ingestd.config import load_config  # noqa: PLC0415
    from ingestd.postgres.settings import SETTINGS  # noqa: PLC0415

    return load_config(config, SETTINGS, os.environ)


def exit_code(error: IngestdError) -> int:
    """Return the exit code for this error."""
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    return EXIT_TRANSIENT if isinstance(error, TransientError) else EXIT_OPERATOR

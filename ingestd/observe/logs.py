"""Logs: constant event names, key=value facts, one line each; JSON unless on a terminal."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TextIO

import structlog

from ingestd.model.printable_text import printable, printable_lines
from ingestd.observe.tracebacks import trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence

    from structlog.typing import EventDict, Processor, WrappedLogger

    from ingestd.config import LogSettings
    from ingestd.config.redaction import Redactor


_REFUSED_EVERY_S = 60.0


class RedactSecrets:
    """A structlog processor, run last: redacts an event, including the text of exceptions."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        """Return the event with every value redacted and fit for JSON."""
        del logger, method
        kept = {k: event[k] for k in ("_record", "_from_structlog") if k in event}
        facts: MutableMapping[str, object] = {
            str(k): self._redactor.tree(v) for k, v in event.items() if k not in kept
        }
        return {**facts, **kept}


def configure(settings: LogSettings, redactor: Redactor, stream: TextIO) -> None:
    """Send the logs of ingestd and of libraries to `stream`. Call once, at the start.

    Libraries log through the standard library's root logger. Both paths end in the same processors,
    so nothing bypasses the redaction.
    """
    pretty = settings.format == "pretty" or (settings.format == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=_last(pretty=pretty, redactor=redactor)
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("ingestd").setLevel(settings.level.upper())
    # It warns of closed connections, which a stop or a cancelled read causes.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def configure_for_library(redactor: Redactor) -> None:
    """Send ingestd's events to the standard library's logger ``ingestd``, one line of text each.

    For a program that has not configured structlog, which would print them to stdout.
    """
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.processors.ExceptionRenderer(trace),
            RedactSecrets(redactor),
            _printable,
            structlog.processors.LogfmtRenderer(key_order=["event"]),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def take_what_is_uncaught() -> None:
    """Send warnings and uncaught errors through the log: they may quote secrets.

    For the process as a whole, after `configure`.
    """
    logging.captureWarnings(capture=True)
    sys.unraisablehook = _log_unraisable
    threading.excepthook = _log_thread


class LoopErrors:
    """Logs a task or callback that failed unobserved, instead of asyncio's default report.

    A handler for `AbstractEventLoop.set_exception_handler`. The default one shows the task with its
    error's text, which may quote a row, or the callback with its arguments. Failed accepts, which
    asyncio reports 100 times a second, are logged once a minute.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._reported_at: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Log the error."""
        del loop
        if self._is_reported(context):
            return
        task = context.get("task") or context.get("future")
        work = task.get_coro() if isinstance(task, asyncio.Task) else None
        structlog.get_logger("ingestd").error(
            "task.failed",
            what=str(context["message"]).partition(" in callback ")[0],
            task=getattr(work, "__qualname__", None),
            exc_info=context.get("exception"),
        )

    def _is_reported(self, context: Mapping[str, Any]) -> bool:
        """Return whether this is a failed accept, and one was reported recently."""
        if "socket" not in context or not isinstance(context.get("exception"), OSError):
            return False
        now = self._monotonic()
        if self._reported_at is not None and now - self._reported_at < _REFUSED_EVERY_S:
            return True
        self._reported_at = now
        return False


def _log_thread(ended: threading.ExceptHookArgs) -> None:
    """Log that a thread ended with an error: its text may quote a secret."""
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
        name = None if ended.thread is None else ended.thread.name
        structlog.get_logger("ingestd").error(
            "thread.failed", thread=name, exc_info=ended.exc_value
        )


def _log_unraisable(hook_args: sys.UnraisableHookArgs) -> None:
    """Log that an object's cleanup failed."""
    structlog.get_logger("ingestd").error(
        "object.failed", what=type(hook_args.object).__name__, exc_info=hook_args.exc_value
    )


def _last(*, pretty: bool, redactor: Redactor) -> Sequence[Processor]:
    renderers: Sequence[Processor] = (
        [
            _printable,
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
        ]
        if pretty
        else [structlog.processors.JSONRenderer()]
    )
    return [
        structlog.processors.ExceptionRenderer(trace),  # to text first: it may quote a DSN
        RedactSecrets(redactor),
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        *renderers,
    ]


def _printable(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Return the event with texts that a terminal and a reader of lines may get.

    JSON needs no such care, and lists and objects are shown as Python would write them.
    """
    del logger, method
    forms = {"exception": printable_lines}
    return {k: forms.get(k, printable)(v) if isinstance(v, str) else v for k, v in event.items()}

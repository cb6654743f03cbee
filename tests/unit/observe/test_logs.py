"""Log lines: one JSON object each, without secrets."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from ingestd.config import LogSettings
from ingestd.config.redaction import Redactor
from ingestd.model.lsn import Lsn
from ingestd.observe.logs import (
    LoopErrors,
    configure,
    configure_for_library,
    take_what_is_uncaught,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield io.StringIO()
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def fail(what: str) -> None:
    raise OSError(what)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


VALUE = "canary"


def fail_by_a_library() -> None:
    try:
        int(VALUE)
    except ValueError as error:
        raise ExceptionGroup(VALUE, [KeyError(VALUE), OSError("no /x")]) from error


def test_a_library_is_not_quoted_in_a_traceback(stream: io.StringIO) -> None:
    configure(LogSettings(), Redactor(), stream)
    try:
        fail_by_a_library()
    except ExceptionGroup:
        structlog.get_logger("ingestd").exception("source.failed")
    logging.getLogger("asyncio").error("never retrieved", exc_info=ValueError(VALUE))
    assert VALUE not in stream.getvalue()
    first, second = lines(stream)
    shown = first["exception"].splitlines()
    assert shown[2:4] == ["ValueError", "which led to:"]
    assert shown[-5:] == ["ExceptionGroup", "of which:", "KeyError", "of which:", "OSError: no /x"]
    assert second["exception"] == "ValueError"


class NotCleared:
    def __del__(self) -> None:
        fail("never of sesame")


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_line(stream: io.StringIO) -> None:
    configure(LogSettings(), Redactor(), stream)
    structlog.get_logger("ingestd").info("epoch.committed", source="shop", end=Lsn(16), rows=3)
    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "epoch.committed",
        "level": "info",
        "source": "shop",
        "end": "0/10",
        "rows": 3,
    }


def test_the_level_holds(stream: io.StringIO) -> None:
    configure(LogSettings(level="warning"), Redactor(), stream)
    structlog.get_logger("ingestd").info("quiet")
    structlog.get_logger("ingestd.pipeline").warning("loud")
    assert [line["event"] for line in lines(stream)] == ["loud"]


def test_secrets_are_masked_in_facts_and_in_exceptions(stream: io.StringIO) -> None:
    configure(LogSettings(), Redactor(["sesame"]), stream)
    log = structlog.get_logger("ingestd")
    try:
        fail("no connection to host=x password=hunter2, sesame")
    except OSError:
        log.exception("source.failed", dsn="postgresql://u:hunter2@h/x", nested=[{"a": "sesame"}])
    text = stream.getvalue()
    assert "no connection to host=x password=***" in text
    assert "hunter2" not in text
    assert "sesame" not in text
    assert len(lines(stream)) == 1


def test_libraries_go_the_same_way(stream: io.StringIO) -> None:
    configure(LogSettings(), Redactor(["sesame"]), stream)
    logging.getLogger("asyncio").warning("slow %s", "sesame")
    logging.getLogger("asyncio").info("chatter")
    assert [line["event"] for line in lines(stream)] == ["slow ***"]


@pytest.mark.parametrize("text_format", ["auto", "pretty"])
def test_a_person_at_a_terminal_gets_text(stream: io.StringIO, text_format: str) -> None:
    del stream
    terminal = Terminal()
    configure(LogSettings.model_validate({"format": text_format}), Redactor(["sesame"]), terminal)
    structlog.get_logger("ingestd").info("source.started", dsn="sesame")
    assert "source.started" in terminal.getvalue()
    assert "sesame" not in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")


def test_uncaught_errors_are_logged_the_same_way(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # put back at the end
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    configure(LogSettings(), Redactor(["sesame"]), stream)
    take_what_is_uncaught()
    try:
        thread = threading.Thread(target=fail, args=["with sesame"], name="reader")
        thread.start()
        thread.join()
        NotCleared()  # collected at once
        warnings.warn("about sesame", UserWarning, stacklevel=1)
    finally:
        logging.captureWarnings(capture=False)
    found = lines(stream)
    assert [line["event"] for line in found[:2]] == ["thread.failed", "object.failed"]
    assert found[0]["thread"] == "reader"
    assert "OSError: with ***" in found[0]["exception"]
    assert "UserWarning: about ***" in found[2]["event"]
    assert "sesame" not in stream.getvalue()


async def fail_later(message: str) -> None:
    fail(message)


async def convert(value: str) -> None:
    int(value)


@pytest.mark.slow
def test_unretrieved_task_errors_are_logged_without_values(stream: io.StringIO) -> None:
    configure(LogSettings(), Redactor(["sesame"]), stream)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors())
        for forgotten in (convert("canary"), fail_later("with sesame")):
            task = asyncio.create_task(forgotten)
            await asyncio.wait([task])
            del task
            gc.collect()
        loop.call_soon(int, "canary")
        await asyncio.sleep(0)

    asyncio.run(run())
    found = lines(stream)
    assert [line["event"] for line in found] == ["task.failed"] * 3
    assert [line["task"] for line in found] == ["convert", "fail_later", None]
    never = "Task exception was never retrieved"
    assert [line["what"] for line in found] == [never, never, "Exception"]
    assert found[0]["exception"].endswith("\nValueError")
    assert "in convert" in found[0]["exception"]
    assert "OSError: with ***" in found[1]["exception"]
    for text in ("canary", "sesame"):
        assert text not in stream.getvalue()


def test_connections_that_cannot_be_taken_do_not_fill_the_log(
    stream: io.StringIO,
) -> None:
    configure(LogSettings(), Redactor(), stream)
    clock = [1000.0]
    tell_of_loop = LoopErrors(lambda: clock[0])
    refused = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(24, "Too many open files"),
        "socket": object(),
    }
    loop = asyncio.new_event_loop()
    for seconds in (0, 0.1, 59, 61):
        clock[0] = 1000.0 + seconds
        tell_of_loop(loop, refused)
    tell_of_loop(loop, {"message": "another", "exception": OSError(5, "broken")})
    loop.close()
    told = [line["what"] for line in lines(stream)]
    assert told == [refused["message"], refused["message"], "another"]


NAMES = "public.x\x1b[31m\x1b]0;title\x07", "b\rERROR", "c\u2028ERROR", "d\x85ERROR", "e\nERROR"
"""Names that the owner of a captured table may choose."""


@pytest.mark.attack("table owner")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_library", [False, True])
def test_a_name_is_no_escape_sequence_and_no_line(
    stream: io.StringIO, *, name: str, is_library: bool
) -> None:
    """The owner of a captured table could write to the terminal of who runs the daemon."""
    if is_library:
        configure_for_library(Redactor())
        handler = logging.StreamHandler(stream)
        logging.getLogger().handlers = [handler]
    else:
        configure(LogSettings(format="pretty"), Redactor(), stream)
    structlog.get_logger("ingestd").warning("table.stopped", table=name, cause=[name])
    shown = stream.getvalue().removesuffix("\n")
    for colors in ("\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[33m", "\x1b[35m", "\x1b[36m"):
        shown = shown.replace(colors, "")
    assert shown.isprintable(), shown
    assert "table.stopped" in shown

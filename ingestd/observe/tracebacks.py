"""Tracebacks for a log: where an error arose, without text that may quote a row."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from ingestd.model.errors import IngestdError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from structlog.typing import ExcInfo

_WITHOUT_VALUES = (IngestdError, OSError)
"""Their texts are about files, addresses and names; other errors quote their arguments."""


def trace(exc_info: ExcInfo) -> str:
    """Return the traceback of an error and of the errors that led to it, the first one first.

    A structlog exception formatter. The texts of libraries' errors are omitted.
    """
    return "\n".join(_lines(exc_info[1], set()))


def _lines(error: BaseException, seen: set[int]) -> Iterator[str]:
    if id(error) in seen:
        return
    seen.add(id(error))
    before = error.__cause__
    if before is None and not error.__suppress_context__:
        before = error.__context__
    if before is not None:
        yield from _lines(before, seen)
        yield "which led to:"
    for frame in traceback.format_tb(error.__traceback__):
        yield frame.rstrip("\n")
    kind = type(error)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    yield f"{name}: {error}" if isinstance(error, _WITHOUT_VALUES) else name
    if isinstance(error, BaseExceptionGroup):
        for held in error.exceptions:
            yield "of which:"
            yield from _lines(held, seen)

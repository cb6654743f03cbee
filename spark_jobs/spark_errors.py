"""Spark's errors as errors for the operator, without pages of Java and without row values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ingestd.model.errors import OperatorError, TransientError

if TYPE_CHECKING:
    from ingestd.model.errors import IngestdError


def meaning_of(error: Exception) -> IngestdError:
    """Return the error to show: an operator's for a wrong request, else a transient one.

    Of an AnalysisException it has the first line, which names tables and columns. Of all others it
    has only the condition and the class: their texts contain values.
    """
    kind, condition = type(error).__name__, condition_of(error)
    if kind == "AnalysisException":
        return OperatorError(f"Spark refused: {_first_line(error)}")
    java = getattr(error, "java_exception", None)
    if java is not None:
        kind = java.getClass().getName()
    shown = f"{kind} ({condition})" if condition else kind
    return TransientError(
        f"Spark failed: {shown}",
        reason="spark",
        remedy="see Spark's log; the next run repeats what was not committed",
    )


def condition_of(error: Exception) -> str | None:
    """Return the name of Spark's error condition; None for an error without one."""
    ask = getattr(error, "getCondition", None) or getattr(error, "getErrorClass", None)  # (3.5)
    found = ask() if callable(ask) else None
    if found is not None:
        return str(found)
    named = _NAMED.match(str(error))  # all that Spark Connect 3.5 says
    return None if named is None else named[1]


_NAMED = re.compile(r"(?:\([\w.$]+\) )?\[([A-Z][A-Z0-9_.]+)\]")
"""A condition at the beginning of an error's text, after its class in Java."""


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no text")[:500]

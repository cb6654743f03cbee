"""What Spark's errors mean to whoever runs a job, without pages of Java and values of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ingestd.model.errors import OperatorError, TransientError

if TYPE_CHECKING:
    from ingestd.model.errors import IngestdError


def meaning_of(error: Exception) -> IngestdError:
    """Return the error to show: an operator's for what was asked wrongly, else a transient one.

    An AnalysisException's first line is shown, it names tables and columns. Of others only the
    condition and the class: their texts quote values.
    """
    kind, condition = type(error).__name__, _condition(error)
    if kind == "AnalysisException":
        return OperatorError(f"Spark refused: {_first_line(error)}")
    java = getattr(error, "java_exception", None)
    if java is not None:
        kind = java.getClass().getName()
    told = f"{kind} ({condition})" if condition else kind
    return TransientError(
        f"Spark failed: {told}",
        reason="spark",
        remedy="its log has the rest; what was not committed is done again by the next run",
    )


def _condition(error: Exception) -> str | None:
    ask = getattr(error, "getCondition", None)
    found = ask() if callable(ask) else None
    return None if found is None else str(found)


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no text")[:500]

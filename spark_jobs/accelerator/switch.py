"""Turns the accelerator off for the rest of a run."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark.errors import PySparkException

from spark_jobs.accelerator.jvm import java_class
from spark_jobs.spark_errors import condition_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ORDINARY = (
    "java.io.IOException",
    "java.util.ConcurrentModificationException",
    "org.apache.spark.SparkThrowable",
)
"""Classes of the errors that Delta's classes raise where they work: of files, and of conflicts."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Whether the driver still uses Delta's classes. Safe to use from several threads."""

    _off: threading.Event = field(default_factory=threading.Event)

    @property
    def is_off(self) -> bool:
        """Return whether Spark does everything."""
        return self._off.is_set()

    def stays_on(self, session: SparkSession, error: Py4JError | PySparkException) -> bool:
        """Return whether an error is of a store or of a conflict. If not, turn off, log it once.

        All others, such as a missing method or a refused class, show that the session's Delta is
        not as the driver expects it.
        """
        if _is_ordinary(session, error):
            return True
        if not self.is_off:
            self._off.set()
            structlog.get_logger("ingestd").warning("accelerator.off", reason=_reason(error))
        return False


def _is_ordinary(session: SparkSession, error: Py4JError | PySparkException) -> bool:
    if isinstance(error, PySparkException):
        return condition_of(error) is not None  # (without it, any error of Java's)
    if isinstance(error, Py4JNetworkError):  # the JVM has ended, and Spark with it
        return True
    if not isinstance(error, Py4JJavaError):
        return False
    try:
        is_instance = java_class(session, "py4j.reflection.TypeUtil").isInstanceOf
        return any(is_instance(name, error.java_exception) for name in _ORDINARY)
    except Py4JError:
        return False


def _reason(error: Py4JError | PySparkException) -> str:
    """Return what failed, by names of classes and methods: texts of Java's may have row values."""
    if isinstance(error, PySparkException):
        return type(error).__name__
    if isinstance(error, Py4JJavaError):
        return str(error.java_exception.getClass().getName())
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = next((line for line in lines if line.startswith("py4j.")), lines[0] if lines else "")
    return found[:300]

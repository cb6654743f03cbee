"""A client of Spark Connect in a separate process, as `pip install pyspark-client` makes one.

It has no py4j and no driver: their imports fail, and a session that is asked for its JVM raises
AssertionError. So whatever a job does there, it does by calls that every client has.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
OF_A_DRIVER = ("py4j", "pyspark.core")
OF_A_JVM = {"_jconf", "_jsc", "_jsparkSession", "_jvm", "_sc", "newSession", "sparkContext"}
LONGEST_S = 300.0
"""What a call may take."""


@dataclass(frozen=True)
class Ended:
    """The exit code of a job, and what it printed to stderr."""

    code: int
    said: str


class DiedError(Exception):
    """The client's process ended in a call."""


class ConnectClient:
    """Calls functions in the process, which begins with the first call and after each death."""

    def __init__(self, remote: str) -> None:
        self.remote = remote
        self._process: ProcessPoolExecutor | None = None

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._process is None:
            self._process = ProcessPoolExecutor(
                1,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_become_client,
                initargs=(self.remote,),
            )
        try:
            return self._process.submit(function, *arguments).result(timeout=LONGEST_S)
        except BrokenProcessPool as error:
            self.close()
            raise DiedError from error

    def run(
        self, name: str, arguments: Sequence[str], *, dies_after: int = 0, **parts: Any
    ) -> Ended:
        """Run `spark_jobs.NAME`. `dies_after`: the commit after which its process is killed."""
        return self.call(_run, name, list(arguments), dies_after, parts)

    def close(self) -> None:
        if self._process is not None:
            self._process.shutdown()
            self._process = None


def _become_client(remote: str) -> None:
    for name in OF_A_DRIVER:
        sys.modules[name] = None  # type: ignore[assignment] # an import raises ImportError
    os.environ["SPARK_REMOTE"] = remote
    from pyspark.sql.connect.session import SparkSession  # noqa: PLC0415 - not in the parent

    def refuse(_: Any, attribute: str) -> Any:
        assert attribute not in OF_A_JVM, attribute
        raise AttributeError(attribute)

    SparkSession.__getattr__ = refuse  # type: ignore[method-assign]


def _run(name: str, arguments: list[str], dies_after: int, parts: dict[str, Any]) -> Ended:
    from spark_jobs.cli.arguments import run_job  # noqa: PLC0415 - as above

    main = importlib.import_module(f"spark_jobs.{name}").main
    commits = 0

    def count(_: str) -> None:
        nonlocal commits
        commits += 1
        if commits == dies_after:
            os._exit(9)

    if dies_after:
        parts = {**parts, "after_commit": count}
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            run_job(lambda given: int(main(given, **parts)), arguments)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return Ended(code, said.getvalue())

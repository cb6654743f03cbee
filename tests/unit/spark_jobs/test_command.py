from __future__ import annotations

import asyncio
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.model.errors import OperatorError
from spark_jobs.cli.arguments import run_coroutine, run_job, run_until_stopped, spark_uri
from spark_jobs.mirror import parser
from spark_jobs.session import ensure_driver

if TYPE_CHECKING:
    from collections.abc import Sequence

GIVEN = ["--source", "shop", "--target", "m"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tables", "nix"], "'nix' is not `schema.table`"),
        (["--interval", "-1"], "must be above 0, not -1"),
        (["--parallel", "0"], "must be above 0, not 0"),
        (["--parallel", "many"], "invalid int value: 'many'"),
    ],
)
def test_senseless_arguments_are_a_usage_error(
    capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args([*GIVEN, *more])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("../lake", "/a/lake"),
        ("lake/", "/a/b/lake"),
        ("./x/../lake", "/a/b/lake"),
        ("/x//y/../lake/", "/x/lake"),
        ("file:///x/y/../lake", "/x/lake"),
        ("s3://bucket/lake/", "s3a://bucket/lake"),
    ],
)
def test_a_path_is_as_hadoop_names_its_files(
    monkeypatch: pytest.MonkeyPatch, uri: str, path: str
) -> None:
    monkeypatch.setattr(Path, "absolute", lambda given: Path("/a/b", given))
    assert spark_uri(uri) == path


def test_a_coroutine_runs_with_and_without_a_running_loop() -> None:
    async def named() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    async def notebook() -> str:
        return run_coroutine(named())

    assert run_coroutine(named()) == threading.current_thread().name
    assert asyncio.run(notebook()).startswith("ingestd-job")


def test_only_a_fault_exits(capsys: pytest.CaptureFixture[str]) -> None:
    """A notebook shows every exit as a failure."""

    def failing(_: Sequence[str]) -> int:
        raise OperatorError("no lake", remedy="name one")

    run_job(lambda _: 0, [])
    for job, code in ((failing, 1), (lambda _: 75, 75)):
        with pytest.raises(SystemExit) as ended:
            run_job(job, [])
        assert ended.value.code == code
    assert capsys.readouterr().err.startswith("no lake")


def test_a_job_in_another_thread_handles_no_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)
    ran: list[threading.Event] = []

    def job(_: Sequence[str], stop: threading.Event) -> int:
        ran.append(stop)
        return 0

    with ThreadPoolExecutor(1) as threads:
        threads.submit(run_until_stopped, job).result()
    assert len(ran) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_job_that_writes_by_spark_refuses_databricks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    with pytest.raises(OperatorError, match="ingestd mirror can't run on Databricks"):
        ensure_driver("ingestd mirror", None, None)


def test_a_job_of_the_driver_refuses_a_connect_session() -> None:
    of_connect: Any = SimpleNamespace()
    classic: Any = SimpleNamespace(_jvm=object())
    for running, remote in ((of_connect, None), (None, "sc://localhost:15002")):
        with pytest.raises(OperatorError, match=r"Connect server(.|\n)*standard access mode"):
            ensure_driver("ingestd mirror", running, remote)
    ensure_driver("ingestd mirror", classic, "sc://localhost:15002")  # the session that runs wins
    ensure_driver("ingestd mirror", None, None)

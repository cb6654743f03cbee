from __future__ import annotations

import asyncio
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.model.errors import ConfigError, OperatorError
from spark_jobs.accelerator.choice import accelerator_of
from spark_jobs.cli.arguments import (
    ensure_same_everywhere,
    run_coroutine,
    run_job,
    run_until_stopped,
    spark_uri,
)
from spark_jobs.delta_log.acceleration import SparkAlone
from spark_jobs.mirror import parser
from spark_jobs.session import job_session, require_versions

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


class RemoteSession:
    """As much of a Connect session as tells its version."""

    __module__ = "pyspark.sql.connect.session"

    def __init__(self, version: str) -> None:
        self.version = version


def test_a_client_newer_than_its_server_is_refused() -> None:
    server: Any = RemoteSession("3.5.7")
    with pytest.raises(OperatorError, match=r"newer than(.|\n)*'pyspark\[connect\]==3\.5\.7'"):
        require_versions(server, with_delta=False)


@pytest.mark.parametrize(
    ("remote", "said"),
    [
        ("local[2]", "local[2] is not the address of a Spark Connect server"),
        ("sc://127.0.0.1:1/;token=hidden", "sc://127.0.0.1:1/ can't be used: it did not answer"),
        ("sc://127.0.0.1:x", "sc://127.0.0.1:x can't be used"),
    ],
)
def test_a_server_that_does_not_answer_is_named(remote: str, said: str) -> None:
    with pytest.raises(OperatorError) as error:
        job_session("ingestd test", remote=remote, reach_s=0.5)
    assert said in str(error.value)
    assert "hidden" not in str(error.value)


def test_on_databricks_spark_does_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Delta has other classes; so has a Connect server, which this process does not reach."""
    classic: Any = SimpleNamespace()
    remote: Any = RemoteSession("4.2.0")
    assert isinstance(accelerator_of(remote), SparkAlone)
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    assert isinstance(accelerator_of(classic), SparkAlone)


def test_a_relative_path_is_refused_on_a_server() -> None:
    given = parser().parse_args([*GIVEN, "--lake", "/lake"])
    with pytest.raises(ConfigError, match=r"--target m: a relative path has no meaning"):
        ensure_same_everywhere(given)
    for target in ("s3://lake/mirror", "/mirror", "file:///mirror"):
        given.target = target
        ensure_same_everywhere(given)

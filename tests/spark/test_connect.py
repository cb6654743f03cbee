"""Jobs by Spark Connect: a server in the tests' JVM, and a client that has neither JVM nor py4j."""

from __future__ import annotations

import importlib.util
import multiprocessing
import random
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.model.errors import OperatorError
from spark_jobs.epochs import latest
from spark_jobs.lake.targets import table_path
from spark_jobs.mirrors.job import MirrorJob
from spark_jobs.mirrors.policy import MirrorPolicy
from tests.harness.connect_client import ConnectClient, DiedError, Ended
from tests.harness.feeds import Feeds
from tests.harness.history_logs import KeyedLog, KeylessLog
from tests.harness.workload import Workload
from tests.spark.test_feed import Recorded, current
from tests.spark.test_history import (
    KEYED,
    KEYLESS,
    Job,
    assert_same,
    fold_keyed,
    fold_keyless,
    plain,
    write,
)
from tests.spark.test_mirror import Mirror, Simulated, change, raw, table
from tests.spark.test_reconcile import Shop, make_shop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from spark_jobs.engine.table_mover import TableJob
    from tests.harness.databases import Database
    from tests.harness.raw_lake import RawLake

__all__ = ["make_shop", "raw"]

BY_SPARK = MirrorPolicy(few_rows=-1, driver_rows=-1, small_bytes=0, changed_share=0)
MERGED = MirrorPolicy(small_bytes=0, changed_share=0)
WAYS = (MirrorPolicy(), BY_SPARK, MERGED)
"""Folded by the client, then a plain write; all by Spark; folded by the client, then a MERGE."""


@pytest.fixture(scope="module")
def remote(spark: SparkSession) -> Iterator[str]:
    """The address of a Connect server in the JVM of `spark`, on a free port of loopback."""
    if importlib.util.find_spec("grpc") is None:
        pytest.fail(
            "a client of Spark Connect needs more: pip install -c constraints.txt -e '.[dev]'"
        )
    jvm: Any = spark._jvm  # noqa: SLF001 - the server has no Python API
    companion = getattr(jvm, "org.apache.spark.sql.connect.service.SparkConnectService$")
    service = getattr(companion, "MODULE$")
    service.start(jvm.org.apache.spark.SparkContext.getOrCreate())
    yield f"sc://127.0.0.1:{service.localPort()}"
    nothing = jvm.scala.Option.apply(None)
    service.stop(nothing, nothing)


@pytest.fixture(scope="module")
def client(remote: str) -> Iterator[ConnectClient]:
    made = ConnectClient(remote)
    yield made
    made.close()


class RemoteMirror(Mirror):
    """A mirror that is moved by a client, and read by the tests' own session."""

    def __init__(
        self, spark: SparkSession, raw: RawLake, target: Path, client: ConnectClient
    ) -> None:
        super().__init__(spark, raw, target)
        self.client = client

    def run(self, *more: str, job: TableJob | None = None) -> int:
        ended = self.end(*more, job=job)
        sys.stderr.write(ended.said)
        return ended.code

    def end(self, *more: str, **parts: Any) -> Ended:
        lake = ["--lake", str(self.raw.uri), "--source", self.raw.source, "--target", self.target]
        return self.client.run("mirror", [*lake, "--once", *more], **parts)


@pytest.fixture
def mirror(
    spark: SparkSession, raw: RawLake, tmp_path: Path, client: ConnectClient
) -> RemoteMirror:
    return RemoteMirror(spark, raw, tmp_path / "mirror", client)


def test_mirrors_equal_their_sources(mirror: RemoteMirror, raw: RawLake) -> None:
    """Both at a time; key changes, unsent values, a truncate and late chunks; without a key."""
    chance = random.Random(5)
    keyed, bare = Simulated(table("a"), chance), table("b", identity="f", oid=2)
    copies: Counter[Any] = Counter()
    for batch, policy in enumerate(WAYS):
        for _ in range(8):
            keyed.transaction(raw.next_lsn())
        if batch == 1:
            keyed.truncate(raw.next_lsn())
        changes = keyed.take() + keyed.late
        keyed.late, keyed.held = keyed.held, []
        keyed.read(raw.next_lsn())
        rows = [(chance.randint(1, 3), "x", batch) for _ in range(5)]
        removed = [row for row in copies.elements() if chance.random() < 0.5]
        copies = copies + Counter(rows) - Counter(removed)
        ops = [("c", row) for row in rows] + [("d", row) for row in removed]
        lsn = raw.next_lsn()
        copied = [change(op, key, x, lsn, seq, n=n) for seq, (op, (key, x, n)) in enumerate(ops, 1)]
        raw.commit({keyed.table: changes, bare: copied})
        raw.record("live", keyed.table, bare)
        assert mirror.run("--parallel", "2", job=MirrorJob(policy=policy)) == 0
        assert mirror.rows(keyed.table) == keyed.expected(), f"batch {batch}"
        assert mirror.rows(bare) == sorted(copies.elements()), f"batch {batch}"
    assert list(latest(mirror.spark, mirror.target)) == ["public.a", "public.b"]


@pytest.mark.parametrize("keyed", [True, pytest.param(False, marks=pytest.mark.thorough)])
async def test_histories_are_those_of_their_changes(
    spark: SparkSession, client: ConnectClient, lake: Path, tmp_path: Path, *, keyed: bool
) -> None:
    """Key changes and values that were not sent, in two batches; the second has what came late."""
    chance = random.Random(3)
    log: Any = KeyedLog(chance, keys=12) if keyed else KeylessLog(chance)
    if keyed:
        log.first_load()
    else:
        log.read()
    for _ in range(2):
        for _ in range(8):
            log.transaction()
        log.close()
        if keyed:
            log.read_anew(transactions=2)
        else:
            log.read(late=2)
    log.transaction()
    log.close()
    epochs = [epoch for epoch in log.epochs if epoch]
    of, fold = (KEYED, fold_keyed) if keyed else (KEYLESS, fold_keyless)
    target = str(tmp_path / "history")
    job = Job(spark, lake, table_path(target, str(of.id)), str(of.id))
    given = ["--lake", str(lake), "--source", "shop", "--target", target, "--once"]
    half, low = len(epochs) // 2, 1
    for first, end in ((0, half), (half, len(epochs))):
        low = (await write(lake, of, epochs[first:end], at_lsn=low))[-1]
        ended = client.run("history", given)
        assert ended.code == 0, ended.said
        assert_same(job.versions(), plain(epochs[:end], fold))


@pytest.mark.thorough
def test_every_change_is_in_the_feed(client: ConnectClient, raw: RawLake, tmp_path: Path) -> None:
    """Keys are swapped, without the values that move with them."""
    source = Recorded(table("a"), random.Random(2))
    feeds = Feeds(Path(raw.uri), tmp_path / "feed")
    for batch in range(2):
        for _ in range(8):
            source.transaction(raw.next_lsn())
        if batch:
            source.swap(raw.next_lsn())
        source.at[raw.commit({source.table: source.take()})] = source.expected()
        raw.record("live", source.table)
        ended = client.run("feed", [*feeds.arguments, "--once"])
        assert ended.code == 0, ended.said
        assert current(feeds.rows("public.a"), raw.epoch) == source.at[raw.epoch]


@pytest.mark.thorough
def test_a_mirror_is_reconciled(
    workload_database: Database, make_shop: Any, client: ConnectClient
) -> None:
    """By tasks of the server, which read the source: equal, then a row is missing."""
    shop: Shop = make_shop(("public.documents",))
    with Workload(workload_database.dsn, seed=7, transactions=20) as writers:
        writers.join()
    shop.catch_up()
    given = shop.arguments("--wait", "90s")
    ended = client.run("reconcile", given)
    assert ended.code == 0, ended.said
    shop.alter("public.documents", lambda rows: rows[1:])
    assert client.run("reconcile", given).code == 1


def test_killed_between_commits_it_ends_without_duplicates(
    mirror: RemoteMirror, raw: RawLake
) -> None:
    """The process dies after its first commit, as often as there is one to be made."""
    a, b = table("a", identity="f"), table("b", oid=2)
    lsn = raw.next_lsn()
    raw.commit(
        {
            a: [change("c", i, "x", lsn, 10 + n) for n, i in enumerate((1, 1, 2))],
            b: [change("c", 1, "y", lsn, 1)],
        }
    )
    raw.record("live", a, b)
    for _ in range(3):  # two mirrors and the cut
        with pytest.raises(DiedError):
            mirror.end("--parallel", "1", dies_after=1)
    assert mirror.end("--parallel", "1", dies_after=1).code == 0
    assert [row[0] for row in mirror.rows(a)] == [1, 1, 2]
    assert [row[0] for row in mirror.rows(b)] == [1]


OTHERS = {
    "spark.sql.caseSensitive": "true",
    "spark.sql.session.timeZone": "Australia/Lord_Howe",
    "spark.databricks.delta.commitInfo.userMetadata": "mine",
}


def settings_of_client(given: dict[str, str]) -> dict[str, str]:
    """Give the client's session these settings, and return all that it has."""
    from spark_jobs.session import job_session  # noqa: PLC0415 - only in the client

    session = job_session("ingestd test")
    for name, value in given.items():
        session.conf.set(name, value)
    return {row["key"]: row["value"] for row in session.sql("SET").collect()}


def forget_cloning() -> None:
    """Make the client like one before Spark 4.1."""
    from pyspark.sql.connect.session import SparkSession  # noqa: PLC0415 - only in the client

    del SparkSession.cloneSession


@pytest.mark.parametrize("clones", [True, False])
def test_a_session_keeps_its_settings(
    spark: SparkSession, raw: RawLake, tmp_path: Path, remote: str, *, clones: bool
) -> None:
    """Also where a server makes no further session; then one table is moved at a time."""
    client = ConnectClient(remote)
    try:
        if not clones:
            client.call(forget_cloning)
        before = client.call(settings_of_client, OTHERS)
        assert OTHERS.items() <= before.items()
        mirror = RemoteMirror(spark, raw, tmp_path / "mirror", client)
        tables = [table("a"), table("b", oid=2)]
        for policy in (MirrorPolicy(), BY_SPARK):
            lsn = raw.next_lsn()
            raw.commit({t: [change("c", lsn, "x", lsn, 1)] for t in tables})
            raw.record("live", *tables)
            assert mirror.run("--parallel", "2", job=MirrorJob(policy=policy)) == 0
        for one in tables:
            assert [row[0] for row in mirror.rows(one)] == [lsn - 10, lsn]
        assert client.call(settings_of_client, {}) == before
    finally:
        client.close()


def refused_by_client(settings: dict[str, str]) -> str:
    """Return the error of a derived session with these settings."""
    from spark_jobs.own_session import derived_session  # noqa: PLC0415 - as above
    from spark_jobs.session import job_session  # noqa: PLC0415

    with pytest.raises(OperatorError) as error:
        derived_session(job_session("ingestd test"), settings)
    return str(error.value)


def test_what_cannot_work_is_refused(mirror: RemoteMirror, raw: RawLake) -> None:
    """A relative path, which is another folder there, and a setting that the server refuses."""
    for name, given in (("--lake", "lake"), ("--target", "~/mirror")):
        ended = mirror.end(name, given)
        assert ended.code == 2
        assert f"{name} {given}: a relative path has no meaning" in ended.said
    ended = mirror.end("--lake", f"{raw.uri}/nothing")
    assert (ended.code, "source shop has no epochs" in ended.said) == (1, True)
    said = mirror.client.call(refused_by_client, {"spark.sql.extensions": "x"})
    assert said.startswith("this Spark lets no job set spark.sql.extensions")


def delta_lacks() -> str:
    """Start a server without Delta; return the error of a session there."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - only in the process that is a server

    from spark_jobs.session import require_versions  # noqa: PLC0415

    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    builder = SparkSession.builder.remote("local[1]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    try:
        with pytest.raises(OperatorError) as error:
            require_versions(session)
        return str(error.value)
    finally:
        session.stop()


@pytest.mark.thorough
def test_a_server_without_delta_is_named() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        said = process.submit(delta_lacks).result(timeout=120)
    assert "has no Delta, or not its SQL" in said
    assert "--packages io.delta:" in said

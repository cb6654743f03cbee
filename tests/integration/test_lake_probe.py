"""`ingestd check` of a lake in an S3 store: whether a second commit is refused (I5)."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ingestd.lake.check import probe
from ingestd.lake.store.store import open_store
from tests.harness.object_store import ObjectStoreServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LATENCY_S = 0.05
"""So that two commits that are raced meet."""
MANY = 1000
LIMIT_S = 120


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectStoreServer]:
    with ObjectStoreServer() as server:
        server.delay(LATENCY_S)
        yield server


@pytest.fixture
def store(running: ObjectStoreServer, way: str) -> ObjectStoreServer:
    running.begin_anew(by_deltalake=way == "deltalake")
    running.recover()
    return running


def left_in(store: ObjectStoreServer) -> list[str]:
    files = open_store(store.uri, store.options)
    return [*files.files(""), *files.folders("")]


@pytest.mark.thorough
def test_one_writer_a_store_that_overwrites_fails_the_probe(
    store: ObjectStoreServer, way: str
) -> None:
    good = probe(store.uri, store.options)
    store.overwrite(MANY)
    bad = probe(store.uri, store.options)
    store.recover()

    cost = {"obstore": "two requests a table", "deltalake": "the option user_agent"}[way]
    assert good.level == "ok"
    assert good.detail.startswith("writable; an epoch costs ")
    assert good.detail.endswith(cost)
    assert bad.level == "fail"
    assert "does not refuse a put with If-None-Match where the object exists" in bad.detail
    assert left_in(store) == []


@pytest.mark.thorough
def test_one_writer_a_store_without_conditional_put_is_reported(
    store: ObjectStoreServer,
) -> None:
    store.know_no_conditions(MANY)
    found = probe(store.uri, store.options)
    store.recover()

    assert found.level == "fail"
    assert "If-None-Match" in found.detail
    assert left_in(store) == []


def test_the_step_that_failed_is_named_and_the_stores_own_words(
    store: ObjectStoreServer, way: str
) -> None:
    method = {"obstore": "PUT", "deltalake": "POST"}[way]  # deltalake puts in parts
    store.expire(method, "_ingestd_probe_")

    found = probe(store.uri, store.options)

    assert store.faults_left() == []
    assert found.level == "fail"
    assert "can't write" in found.detail
    assert "ExpiredToken" in found.detail
    assert "credentials" in str(found.remedy)
    assert left_in(store) == []


def test_a_missing_bucket_is_reported(store: ObjectStoreServer) -> None:
    found = probe("s3://nosuch/lake", store.options)

    assert found.level == "fail"
    assert "NoSuchBucket" in found.detail
    assert "Debug" not in found.detail


def test_missing_keys_are_reported_without_the_librarys_own_log(
    store: ObjectStoreServer, tmp_path: Path
) -> None:
    options = {key: value for key, value in store.options.items() if "SECRET" not in key}
    config = tmp_path / "c.toml"
    config.write_text(
        f'[lake]\nuri = "{store.uri}"\n[lake.storage_options]\n'
        + "".join(f'{key} = "{value}"\n' for key, value in options.items())
        + '[sources.s]\nkind = "polling"\ndsn = "host=127.0.0.1 port=1"\ntables = ["a.b"]\n'
    )
    words = [sys.executable, "-m", "ingestd", "check", "-c", str(config)]
    environment = {key: value for key, value in os.environ.items() if "AWS" not in key}
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.stderr == ""
    assert done.returncode == 1
    assert "set the store's keys, in `[lake.storage_options]`" in done.stdout

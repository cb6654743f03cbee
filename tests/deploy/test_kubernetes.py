"""The manifests against Kubernetes' own schemas, and against what ingestd promises."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from ingestd.app.daemon import EXIT_WITHIN_S
from ingestd.config import load_config
from ingestd.config.units import Address
from ingestd.postgres.settings import SETTINGS
from tests.harness.config import wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

FOLDER = Path(__file__).parent.parent.parent / "deploy" / "kubernetes"
BASE = FOLDER / "base"
LIMIT_S = 60
SECRETS = "/run/ingestd/secrets"
VERSIONS = ("1.29", "1.33", "1.37")
"""From the first where ReadWriteOncePod is stable."""


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def manifest(kind: str) -> Any:
    [found] = [m for m in map(load, MANIFESTS) if m["kind"] == kind]
    return found


MANIFESTS = [BASE / name for name in load(BASE / "kustomization.yaml")["resources"]]
OVERLAYS = [FOLDER / "base", FOLDER / "monitoring", FOLDER / "example"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_is_as_kubernetes_wants_it(path: Path, version: str) -> None:
    kubernetes_validate.validate(load(path), version, strict=True)


def test_the_check_notices_a_wrong_manifest() -> None:
    wrong = manifest("StatefulSet")
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_a_kustomization_names_files_that_are_there(overlay: Path) -> None:
    found = load(overlay / "kustomization.yaml")
    generated = chain.from_iterable(g["files"] for g in found.get("configMapGenerator", ()))
    named = [*found["resources"], *found.get("components", ()), *generated]
    assert named
    for name in named:
        assert (overlay / name).exists(), name


@pytest.mark.parametrize("folder", [BASE, FOLDER / "example"], ids=lambda path: path.name)
def test_its_config_is_one_that_ingestd_takes(folder: Path, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "http-token").write_text("0123456789abcdef\n")
    (secrets / "shop-dsn").write_text("host=db.example dbname=shop\n")
    config = tmp_path / "ingestd.toml"
    text = (folder / "ingestd.toml").read_text()
    assert f"file:{SECRETS}/shop-dsn" in text
    config.write_text(text.replace(SECRETS, str(secrets)))
    loaded = load_config(config, SETTINGS, {})
    assert loaded.http.listen == Address("0.0.0.0", 9464)


def test_there_is_one_writer_and_it_has_the_time_to_drain() -> None:
    """I5: a StatefulSet starts the next pod when the last one has ended; a Deployment may not."""
    spec = manifest("StatefulSet")["spec"]
    assert spec["replicas"] == 1
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > EXIT_WITHIN_S + 5
    [volume] = spec["volumeClaimTemplates"]
    assert volume["spec"]["accessModes"] == ["ReadWriteOncePod"]


def test_names_that_belong_together_are_the_same() -> None:
    stateful = manifest("StatefulSet")
    template = stateful["spec"]["template"]
    [container] = template["spec"]["containers"]
    labels = template["metadata"]["labels"]
    assert stateful["spec"]["selector"]["matchLabels"] == labels
    assert manifest("Service")["spec"]["selector"] == labels
    assert manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert manifest("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    volumes = {v["name"] for v in template["spec"]["volumes"]}
    volumes |= {c["metadata"]["name"] for c in stateful["spec"]["volumeClaimTemplates"]}
    assert {m["name"] for m in container["volumeMounts"]} == volumes
    monitor = load(FOLDER / "monitoring" / "servicemonitor.yaml")
    assert monitor["spec"]["selector"]["matchLabels"] == manifest("Service")["metadata"]["labels"]
    assert [e["port"] for e in monitor["spec"]["endpoints"]] == [
        p["name"] for p in manifest("Service")["spec"]["ports"]
    ]


def test_the_readiness_probe_asks_a_real_daemon_with_the_token(
    workload_database: Database, make_daemon: MakeDaemon, lake: Path, tmp_path: Path
) -> None:
    [container] = manifest("StatefulSet")["spec"]["template"]["spec"]["containers"]
    python, flag, script = container["readinessProbe"]["exec"]["command"]
    assert (python, flag) == ("python", "-c")
    token = "asked-by-kubelet-0123456789"
    (tmp_path / "http-token").write_text(f"{token}\n")
    database = workload_database
    daemon = make_daemon(
        wal_config(
            lake=lake,
            dsn=database.dsn,
            source_extra=f'slot = "{database.name}"\npublication = "{database.name}"',
        )
    )
    script = script.replace(SECRETS, str(tmp_path)).replace("9464", str(daemon.listen.port))

    def probe() -> int:
        return subprocess.run(
            [sys.executable, "-c", script], capture_output=True, check=False, timeout=60
        ).returncode

    assert probe() != 0  # it does not run
    text = daemon.config_path.read_text()
    daemon.config_path.write_text(text.replace("[http]\n", f'[http]\ntoken = "{token}"\n'))
    daemon.start()
    await_until(lambda: probe() == 0, LIMIT_S, daemon.tail)
    (tmp_path / "http-token").write_text("another-one-0123456789\n")
    assert probe() != 0

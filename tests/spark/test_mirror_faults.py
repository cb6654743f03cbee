from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from deltalake import DeltaTable as RustTable

from ingestd.model.errors import OperatorError
from spark_jobs.epochs import latest, read_at
from spark_jobs.history import as_of_lsn
from spark_jobs.history import main as history_main
from spark_jobs.lake.targets import table_path
from spark_jobs.mirror import main
from tests.harness.raw_lake import RawLake
from tests.spark.test_mirror import Mirror, change, mirror, raw, table

__all__ = ["mirror", "raw"]


class KilledError(Exception):
    pass


@pytest.mark.thorough
@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_killed_after_any_commit_it_ends_without_duplicates(
    mirror: Mirror, raw: RawLake, rounds: int
) -> None:
    """Rows without a key would be duplicated."""
    a, b = table("a", identity="f"), table("b", oid=2)
    for round_ in range(rounds):
        lsn = raw.next_lsn()
        rows = [change("c", i, "x", lsn, 10 + i) for i in (1, 1, 2)]
        raw.commit({a: rows, b: [change("c", round_, "y", lsn, 1)]})
        raw.record("live", a, b)
        raw.next_lsn()
        kills = 0
        while is_killed_after_a_commit(mirror):
            kills += 1
        assert kills >= 2
        assert [row[0] for row in mirror.rows(a)] == sorted([1, 1, 2] * (round_ + 1))
        assert [row[0] for row in mirror.rows(b)] == list(range(round_ + 1))


def is_killed_after_a_commit(mirror: Mirror) -> bool:
    """Run the job; its first commit is its last. False if there was none to be made."""

    def kill(_: str) -> None:
        raise KilledError

    try:
        assert main(arguments(mirror), after_commit=kill) == 0
    except KilledError:
        return True
    return False


def arguments(mirror: Mirror, *more: str) -> list[str]:
    lake = ["--lake", str(mirror.raw.uri), "--source", mirror.raw.source]
    return [*lake, "--target", mirror.target, "--once", "--parallel", "1", *more]


@pytest.mark.thorough
def test_a_fault_of_one_table_stops_that_table_until_fixed(
    mirror: Mirror, raw: RawLake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited, gone, fine = table("edited"), table("gone", oid=2), table("fine", oid=3)
    every = (edited, gone, fine)
    first = raw.next_lsn()
    raw.commit({t: [change("c", 1, "x", first, 1)] for t in every})
    raw.record("live", *every)
    assert mirror.run() == 0
    path = table_path(mirror.target, "public.edited")
    mirror.spark.sql(f"UPDATE delta.`{path}` SET note = 'by hand'")
    # seen without a new epoch; the cut's version is as it was, and what is not there is made
    shutil.rmtree(table_path(mirror.target, "public.fine"))
    assert mirror.run() == 1
    assert "public/edited was changed by another writer" in capsys.readouterr().err
    assert [row[:2] for row in mirror.rows(fine)] == [(1, "x")]
    cut = latest(mirror.spark, mirror.target)
    assert [row["note"] for row in cut["public.edited"].collect()] == ["x"]
    kept = shutil.copytree(table_path(mirror.target, "public.fine"), tmp_path / "kept")
    lsn = raw.next_lsn()
    raw.commit({t: [change("c", 2, "x", lsn, 1)] for t in every})
    lose_rows(raw, "public/gone", raw.epoch)
    assert mirror.run() == 1
    said = capsys.readouterr().err
    assert "public/edited was changed by another writer" in said
    assert "--rebuild public.edited" in said
    assert "rows of epoch 2 are missing" in said
    assert "`ingestd snapshot shop public.gone`" in said
    assert list(latest(mirror.spark, mirror.target)) == ["public.fine"]

    # an older copy is put in a mirror's place
    shutil.rmtree(table_path(mirror.target, "public.fine"))
    shutil.copytree(kept, table_path(mirror.target, "public.fine"))
    assert main(arguments(mirror, "--rebuild", "public.edited")) == 1
    for t in (edited, fine):
        assert [row[:2] for row in mirror.rows(t)] == [(1, "x"), (2, "x")]
    # as the remedies of the mirror and of ingestd say: a new snapshot voids what was lost
    shutil.move(raw.uri / "shop" / "public" / "gone", tmp_path / "gone")
    at = raw.next_lsn()
    raw.record("snapshotting", gone, progress="again|")
    raw.commit(
        {gone: [{"_cdc_op": "t", "_cdc_lsn": at, "_cdc_seq": -1}, change("r", 7, "z", at, 0)]}
    )
    raw.record("live", gone)
    assert mirror.run() == 0
    assert mirror.rows(gone) == [(7, "z", 1)]
    assert list(latest(mirror.spark, mirror.target)) == [
        str(t.id) for t in sorted(every, key=lambda t: t.id)
    ]


@pytest.mark.thorough
def test_missing_files_are_ignored_where_they_do_not_count(
    mirror: Mirror, raw: RawLake, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a store's lifecycle rules remove old files: the tables' logs still name them."""
    void, lost, own = table("void"), table("lost", oid=2), table("own", oid=3)
    every = (void, lost, own)
    lsn = raw.next_lsn()
    raw.commit({t: [change("c", 1, "x", lsn, 1)] for t in every})
    raw.record("live", *every)
    assert mirror.run() == 0
    for folder in ("void", "lost"):
        remove_files(raw.uri / "shop" / "public" / folder)
    remove_files(Path(table_path(mirror.target, "public.own")))
    at = raw.next_lsn()
    read = [{"_cdc_op": "t", "_cdc_lsn": at, "_cdc_seq": -1}, change("r", 2, "y", at, 0)]
    raw.commit({void: read, own: [change("u", 1, "y", at, 3)]})
    assert main(arguments(mirror, "--rebuild", "public.lost", "public.void")) == 1
    said = capsys.readouterr().err
    assert "public/lost: rows of epoch 1 are missing" in said
    assert "public/own: 1 files are missing, such as part-" in said
    assert "--rebuild public.own" in said
    assert [row[:2] for row in mirror.rows(void)] == [(2, "y")]
    history = f"{mirror.target}-history"
    chosen = arguments(mirror, "--target", history, "--tables", "public.void", "public.lost")
    assert history_main(chosen) == 1
    assert "public/lost: all 1 rows of epochs 1 to 2 are missing" in capsys.readouterr().err
    found = as_of_lsn(mirror.spark, history, "public.void", at)
    assert [row["id"] for row in found.collect()] == [2]


def remove_files(folder: Path) -> None:
    for file in folder.glob("*.parquet"):
        file.unlink()


@pytest.mark.thorough
def test_a_mirror_recreated_by_a_killed_run_is_recognized(mirror: Mirror, raw: RawLake) -> None:
    """Its version is no higher than that of the one before."""
    t = table("a", identity="f")
    raw.commit({t: [change("c", 1, "x", raw.next_lsn(), 1)]})
    raw.record("live", t)
    assert mirror.run() == 0
    shutil.rmtree(table_path(mirror.target, "public.a"))
    raw.commit({t: [change("c", 2, "x", raw.next_lsn(), 1)]})
    kills = 0
    while is_killed_after_a_commit(mirror):
        kills += 1
    assert kills >= 2
    assert [row[0] for row in mirror.rows(t)] == [1, 2]


@pytest.mark.thorough
def test_deleted_rows_do_not_return_if_the_deletion_was_lost(
    mirror: Mirror, raw: RawLake, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chunk was read before it, and arrives later."""
    t = table("a")
    raw.commit({t: [change("c", key, "x", raw.next_lsn(), 1) for key in (1, 2)]})
    raw.record("live", t)
    assert mirror.run() == 0
    read_at_lsn = raw.next_lsn()
    raw.commit({t: [change("d", 1, None, raw.next_lsn(), 1)]})
    assert mirror.run() == 0
    deleted_in = raw.epoch
    raw.record("snapshotting", t, progress="again|", at_lsn=raw.next_lsn())
    raw.commit({t: [change("r", key, "x", read_at_lsn, 0) for key in (1, 2)]})
    lose_rows(raw, "public/a", deleted_in)
    assert mirror.run() == 1
    assert "rows of epoch 2 are missing" in capsys.readouterr().err
    assert list(latest(mirror.spark, mirror.target)) == []


def lose_rows(raw: RawLake, folder: str, epoch: int) -> None:
    """Delete the rows of an epoch from a raw table, as a wrong clean-up would."""
    uri = str(raw.uri / "shop" / folder)
    handle = RustTable(uri)
    handle.delete(f"_cdc_epoch = {epoch}")
    RustTable(uri).vacuum(0, dry_run=False, enforce_retention_duration=False)


def test_epochs_are_never_skipped(mirror: Mirror, raw: RawLake) -> None:
    t = table("a")
    for i in range(3):
        raw.commit({t: [change("c", i, "x", raw.next_lsn(), 1)]})
    raw.record("live", t)
    assert mirror.run() == 0
    for i in range(3, 6):
        raw.commit({t: [change("c", i, "x", raw.next_lsn(), 1)]})
    RustTable(str(raw.uri / "shop" / "_epochs")).delete("epoch = 5")
    with pytest.raises(OperatorError, match="epoch 5 is missing, the next one is 6"):
        mirror.run()
    assert latest(mirror.spark, mirror.target).epoch == 3


@pytest.mark.thorough
def test_a_target_is_of_one_lake(mirror: Mirror, raw: RawLake, tmp_path: Path) -> None:
    t = table("a")
    raw.commit({t: [change("c", 1, "x", raw.next_lsn(), 1)]})
    raw.record("live", t)
    assert mirror.run() == 0
    other = RawLake(tmp_path / "other")
    other.commit({t: [change("c", 1, "x", other.next_lsn(), 1)]})
    other.record("live", t)
    into_same = Mirror(mirror.spark, other, tmp_path / "mirror")
    with pytest.raises(OperatorError, match="source shop of another or earlier lake") as found:
        into_same.run()
    assert "--target" in str(found.value.remedy)
    raw.commit({t: [change("u", 1, "y", raw.next_lsn(), 1)]})
    assert mirror.run() == 0
    assert mirror.rows(t) == [(1, "y", 1)]
    with pytest.raises(OperatorError, match="no epochs in this lake"):
        Mirror(mirror.spark, RawLake(tmp_path / "nothing"), tmp_path / "n").run()
    with pytest.raises(OperatorError, match="has no cut at or below epoch 0"):
        read_at(mirror.spark, mirror.target, 0)

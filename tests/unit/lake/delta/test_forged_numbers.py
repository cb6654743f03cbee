"""A number in a log that Python or Arrow can't hold is a fault of that table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from ingestd.lake.delta.append_log import AppendLog
from ingestd.lake.delta.commit import checked_statistics
from ingestd.lake.delta.log_files import open_table
from ingestd.lake.delta.read import list_actions
from ingestd.lake.opening import never_refuse
from ingestd.lake.raw_table import RawTable
from ingestd.lake.store.errors import unreadable
from ingestd.lake.store.store import open_store
from ingestd.model.errors import FolderError
from ingestd.model.schema import TableId
from tests.harness.hostile_folder import add, commit_of, make_table

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.attack("lake writer")

FAR = (1 << 63) - 1
TABLE = TableId("public", "t")


@pytest.mark.parametrize(
    "forged",
    [
        *({"modificationTime": at} for at in (FAR, -FAR, 253402300800000, 1 << 60)),
        *({"size": size} for size in (FAR, -FAR, -1, 1 << 62)),
        *({"stats": json.dumps({"numRecords": n})} for n in (FAR, -1, 1 << 62, 1 << 80)),
    ],
)
def test_a_number_that_no_file_has(tmp_path: Path, forged: dict[str, object]) -> None:
    make_table(tmp_path / "t", commit_of([add("part-1.parquet", **forged)]))
    store = open_store(str(tmp_path), None)
    try:
        [(_, statistics, size, _)] = list_actions(open_table(store, "t"))
    except FolderError:
        return
    except Exception as error:  # noqa: BLE001 - deltalake's own
        assert type(error).__name__ == "DeltaError"  # noqa: PT017
        return
    assert statistics.get("numRecords", 0) < 1 << 40
    assert 0 <= size < 1 << 50


@pytest.mark.parametrize("version", [FAR, FAR - 1, (1 << 48) + 1])
def test_a_version_that_no_log_reaches(tmp_path: Path, version: int) -> None:
    """The next ones would not fit in `_epochs`: no epoch of the source could be closed."""
    log = make_table(tmp_path / "t")
    DeltaTable(tmp_path / "t").create_checkpoint()
    [made] = log.glob("*.checkpoint.parquet")
    made.rename(log / f"{version:020}.checkpoint.parquet")
    (log / "_last_checkpoint").write_text(json.dumps({"version": version, "size": 3}))
    (log / f"{0:020}.json").unlink()
    raw = RawTable(TABLE, AppendLog(open_store(str(tmp_path), None), "t", "x"))
    with pytest.raises(FolderError, match="more than"):
        raw.load(never_refuse)


def test_statistics_are_summed_within_64_bits() -> None:
    assert checked_statistics({"numRecords": 7}) == {"numRecords": 7}
    for forged in (1 << 62, 1 << 40, -1, True, 1.5, "1", None):
        assert checked_statistics({"numRecords": forged}) == {}


@pytest.mark.parametrize("error", [OverflowError(), ZeroDivisionError(), ArithmeticError()])
def test_arithmetic_on_a_log_is_its_fault(error: ArithmeticError) -> None:
    with pytest.raises(FolderError), unreadable("x"):
        raise error

"""Maintenance of damaged tables: each is reported alone, and no row changes (I8)."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from ingestd.lake.delta.read import read_raw
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.maintenance.process import maintain
from tests.harness.damages import AT_START, EVER, NEVER, Damage, cut_files, remove_files
from tests.harness.maintaining import order_of
from tests.unit.lake.rows import inserts, listed_live, make_table, summary

if TYPE_CHECKING:
    from pathlib import Path

DAMAGES: dict[str, Damage] = {
    **EVER,
    **AT_START,
    **NEVER,
    "files_removed": remove_files,
    "files_cut": cut_files,
    "removed": shutil.rmtree,
    "log_removed": lambda f: shutil.rmtree(f / "_delta_log"),
    "no_text": lambda f: _newest(f).write_bytes(b"\xff\xfe\n"),
    "senseless_add": lambda f: _add(f, {"add": {"path": 3}}),
    "senseless_remove": lambda f: _add(f, {"remove": {}}),
}


def _double_rows(folder: Path) -> None:
    """Put a file with more rows in the place of another."""
    paths = pa.table(DeltaTable(folder).get_add_actions())["path"].to_pylist()
    rows = pq.read_table(folder / paths[0], partitioning=None)
    pq.write_table(pa.concat_tables([rows, rows]), folder / paths[0])


DAMAGES["other_rows"] = _double_rows


@pytest.mark.thorough
@pytest.mark.parametrize("cleans_after_days", [0, 30])
async def test_isolated_damage_is_reported_and_others_are_maintained(
    tmp_path: Path, cleans_after_days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _fill(tmp_path)
    root = tmp_path / "shop/public"
    before = {kind: _rows(tmp_path, kind) for kind in DAMAGES}
    for kind, damage in DAMAGES.items():
        damage(root / kind)
    damaged = {kind: _rows(tmp_path, kind) for kind in DAMAGES}
    now_s = time.time() + 86400 * cleans_after_days
    monkeypatch.setattr(time, "time", lambda: now_s)
    told = {line["table"]: line for line in maintain(json.loads(order_of(tmp_path)))}
    assert told["_epochs"].get("joined_files", 0) >= EPOCHS
    assert told["public.untouched"]["joined_files"] == EPOCHS
    assert damaged["untouched"] == before["untouched"] is not None
    for kind in DAMAGES:
        assert _rows(tmp_path, kind) == damaged[kind], kind
        line = told.get(f"public.{kind}")
        if line is None or "error" not in line:
            continue
        assert str(root / kind) in line["error"], line
        assert f"repair {root / kind}, or move that folder away" in line["remedy"], line
        assert line["remedy"].endswith(f"ingestd snapshot shop public.{kind}"), line
    assert {"files_removed", "files_cut", "garbage", "other_rows"} <= {
        table.removeprefix("public.") for table, line in told.items() if "error" in line
    }


EPOCHS = 8


async def _fill(lake: Path) -> None:
    sink = DeltaLake(str(lake), "shop")
    await sink.open()
    await sink.adopt("7000000000000000001")
    await sink.record([listed_live(make_table(kind)) for kind in DAMAGES])
    for number in range(1, EPOCHS + 1):
        writer = sink.begin_epoch()
        for kind in DAMAGES:
            await writer.append_batch(
                inserts(make_table(kind), 100 * number, 2 * number, 2 * number + 1)
            )
        await writer.commit(summary(100 * number, 100 * number + 5))
    await sink.close()


def _rows(lake: Path, kind: str) -> list[Any] | None:
    try:
        rows: pa.Table = read_raw(str(lake), "shop", make_table(kind).id)
    except Exception:  # noqa: BLE001 - whatever is raised, it can't be read
        return None
    return sorted(map(str, rows.to_pylist()))


def _newest(folder: Path) -> Path:
    return max((folder / "_delta_log").glob("*.json"))


def _add(folder: Path, action: dict[str, Any]) -> None:
    newest = _newest(folder)
    newest.with_name(f"{int(newest.stem) + 1:020}.json").write_text(json.dumps(action))

"""No text in the lake has a type, form or size until it was checked, whichever reader reads it."""

from __future__ import annotations

import ast
import base64
import json
import tracemalloc
import zlib
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.lake.delta.log_files import _checkpoint
from ingestd.lake.delta.torn_files import _is_json
from ingestd.lake.lake_id import read_lake_id
from ingestd.lake.layout import Layout
from ingestd.lake.pause_mark import LakePauseMark
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.store import open_store
from ingestd.model.errors import IngestdError
from ingestd.model.lsn import Lsn
from ingestd.model.recorded import RecordError, integer_of, read_json
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.partitions import Leaf
from ingestd.postgres.catalog.user_types import TypeParts
from ingestd.postgres.polling import progress as polling
from ingestd.postgres.polling.keys.lake_keys import WHOLE, KeyPartition
from ingestd.postgres.polling.progress import PollProgress, SeenXids
from ingestd.postgres.rewrites.fingerprint import KeyMark, StoredColumn, TableFingerprint
from ingestd.postgres.snapshot.resume import SnapshotRemainder
from spark_jobs.backfills.validity import are_there
from spark_jobs.delta_log.commits import Signature
from tests.harness.source_code import READS_CODE, modules, name_of, nodes, text_of
from tests.unit.pipeline.fixtures import table

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.attack("lake writer")

MOST_BYTES = 48 << 20
"""Memory that a reader may take for a hostile text of up to 4 MB, beside the text."""
AT = datetime(2026, 1, 2, tzinfo=UTC)
SEEN = SeenXids(700, np.array([700, 703, 1 << 31], np.int64))
PROGRESS = PollProgress(SEEN, SeenXids(800), "2026", "2027", 900, "at", None, 77, 1.5)
REMAINDER = SnapshotRemainder(Lsn(8), ("id",), 900, {7: (70, ((0, 4), (6, None)))})
BLOCKS = BlockRange("public", "t", 1, 5, oid=7, file=70)
LEAF = Leaf(oid=7, schema="public", name="t", file=70, blocks=100, nbytes=8192 * 100)
FINGERPRINT = TableFingerprint(
    (StoredColumn(1, 23, -1, 700, has_missing=False, name="abc"),),
    {7: 70},
    types=(TypeParts(9, 4, "d"),),
    ended=900,
    attach_xids={8: "5"},
    key=KeyMark("d", (1,), 9, (1,), 9),
    toast={7: 71},
)
LAKE = "11111111-2222-3333-4444-555555555555"


OTHERWISE = {
    "ingestd/lake/delta/commit.py": "commits and statistics, with limits of their own",
    "ingestd/lake/delta/log_nesting.py": "commits, before deltalake reads them",
    "ingestd/lake/maintenance/process.py": "the pipe between a daemon and its worker",
    "ingestd/lake/reference/source.py": "a checkpoint that its caller keeps",
    "ingestd/model/recorded.py": "it is the way",
    "ingestd/postgres/rewrites/ddl_log.py": "the database's event trigger",
    "ingestd/postgres/snapshot/key_range.py": "a split on its way to an executor",
    "spark_jobs/backfills/runner.py": "the outcome of a task",
    "spark_jobs/accelerator/file_cache.py": "rows that Delta has typed",
    "spark_jobs/accelerator/driver_merge.py": "a schema that Delta has typed",
    "spark_jobs/source/keeper_process.py": "the keeper's own address",
    "spark_jobs/source/keeper_protocol.py": "signed lines",
    "spark_jobs/source/options.py": "options of a reader",
    "spark_jobs/source/split_frame.py": "an error of an executor",
}
"""Modules with their own call of a parser or decompressor; what it reads is not recorded text."""


def parses(source: str) -> bool:
    """Return whether a module has its own call of a parser or decompressor."""
    calls = (node.func for node in nodes(source) if isinstance(node, ast.Call))
    names = {ast.unparse(call) for call in calls if isinstance(call, ast.Attribute)}
    return bool(names & {"json.loads", "json.load", "zlib.decompress", "zlib.decompressobj"})


@READS_CODE
def test_recorded_texts_are_read_one_way() -> None:
    folders = [f"ingestd/{part}" for part in ("app", "lake", "model", "pipeline", "postgres")]
    found = {name_of(path) for path in modules(*folders, "spark_jobs") if parses(text_of(path))}
    assert found == OTHERWISE.keys()


def cut_remainder(_: Path, text: str) -> object:
    return SnapshotRemainder.parse(text).splits(table("t"), [LEAF], 8192)


def placed(path: Path, text: str) -> LocalStore:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(errors="surrogatepass"))
    return open_store(str(path.parent), None)  # type: ignore[return-value]


def read_pause(folder: Path, text: str) -> object:
    root = Layout("shop").root
    placed(folder / root / "_paused", text)
    return LakePauseMark(str(folder), "shop").read_since()


def read_pointer(folder: Path, text: str) -> object:
    placed(folder / "t" / "_last_checkpoint", text)
    store = open_store(str(folder), None)
    return _is_json(store, "t/_last_checkpoint"), _checkpoint(store, "t")


READERS: dict[str, tuple[str, Any]] = {
    "resume": (PROGRESS.to_text(), lambda _, text: PollProgress.parse(text)),
    "remainder": (str(REMAINDER), cut_remainder),
    "blocks": (BLOCKS.to_text(), lambda _, text: are_there([text], [BLOCKS.to_text()])),
    "marker": (
        json.dumps({"format": 1, "lake": LAKE}),
        lambda folder, text: read_lake_id(placed(folder / "_ingestd.json", text)),
    ),
    "pause": (json.dumps({"since": AT.isoformat()}), read_pause),
    "pointer": ('{"version":7,"size":2}', read_pointer),
    "signature": (Signature("m", "s", "l", 5).to_text(), lambda _, text: Signature.parse(text)),
    "fingerprint": (
        str(FINGERPRINT),
        lambda _, text: TableFingerprint.parse(text),
    ),
}

WRONG: list[object] = [
    *(None, True, -1, 1.5, "x", "", "\0", [], {}, [[]], [None], {"a": 1}, [0, "!"]),
    *(1 << 63, -(1 << 63), 10**30, 1e300, "9" * 60, "9/9/9", "ä" * 9, "0001-../../x"),
    *("9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59", [0, 10**15], [[0, 10**15]]),
]


def with_each_value_wrong(value: Any) -> Iterator[Any]:
    """Yield a value with each part in turn left out, or replaced by one of another type."""
    yield from WRONG
    if isinstance(value, dict):
        for name, part in value.items():
            yield {n: p for n, p in value.items() if n != name}
            yield from (value | {name: wrong} for wrong in with_each_value_wrong(part))
    if isinstance(value, list):
        for at, part in enumerate(value):
            yield value[:at] + value[at + 1 :]
            yield from (
                [*value[:at], wrong, *value[at + 1 :]] for wrong in with_each_value_wrong(part)
            )


def hostile_texts(text: str) -> Iterator[str]:
    """Yield texts that resemble one that ingestd writes."""
    yield from ("", " ", "\0", "null", "nul", text[:-1], text + text, "\ufeff" + text)
    yield from ("[" * 100_000, '{"a":' * 100_000, "[" * 9 + "]" * 9)
    yield from ("[" + "[]," * 700_000 + "1]", "{" + '"a":1,' * 400_000 + '"b":1}')
    yield from ('"' + "a" * (4 << 20) + '"', '"' + '\\"' * (2 << 20), '"' * (1 << 20))
    yield from ("9" * 100_000, "1" + "0" * 4_000, "NaN", "-Infinity", "1e999", '"\\ud800"')
    yield from (text.replace(":", sep) for sep in ("", ":-", ":9", ":" + "9" * 5_000, ":1e9"))
    if not text.startswith("{"):  # of no JSON
        yield from (
            text[:at] + wrong + text[at + 1 :] for at in range(len(text)) for wrong in "|x:"
        )
        return
    yield text.replace("{", '{"a":1,"a":2,', 1)
    yield text.replace(":", ': NaN, "z":', 1)
    first = next(iter(json.loads(text)))
    yield text.replace("{", f'{{"{first}":1,', 1)
    yield text.replace(":", ':"\\ud800","z":', 1)
    yield from map(json.dumps, with_each_value_wrong(json.loads(text)))


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_no_text_has_an_effect_but_a_refusal(reader: str, tmp_path: Path) -> None:
    text, read = READERS[reader]
    assert read(tmp_path, text) not in (None, False)
    tracemalloc.start()
    try:
        for hostile in hostile_texts(text):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with suppress(RecordError, IngestdError):
                read(tmp_path, hostile)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < MOST_BYTES, (peak, hostile[:80])
    finally:
        tracemalloc.stop()


def packed(xids: np.ndarray[Any, Any]) -> str:
    return base64.b85encode(zlib.compress(xids.tobytes(), 9)).decode()


@pytest.mark.parametrize(
    "hostile",
    [
        np.zeros(8 << 20, np.int64),
        np.array([-1]),
        np.array([5, 0]),
        np.array([5, -3]),
        np.array([1 << 62, 1 << 62]),
        np.full(1000, 1 << 60),
        np.array([], np.int64),
        np.array([1, 2, 3], np.int8),
    ],
)
def test_compressed_ids_are_only_what_polling_writes(hostile: np.ndarray[Any, Any]) -> None:
    text = json.dumps(json.loads(PROGRESS.to_text()) | {"whole": [5, packed(hostile)]})
    tracemalloc.start()
    try:
        assert PollProgress.parse(text) is None
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_a_bomb_behind_other_data_is_refused() -> None:
    bomb = zlib.compress(bytes(64 << 20), 9)
    for content in (bomb, zlib.compress(b"") + bomb, bomb[:-4], b"", b"x"):
        text = base64.b85encode(content).decode()
        with pytest.raises(RecordError):
            read_json(json.dumps(text), 1 << 20).packed(1 << 20)


@pytest.mark.thorough
def test_the_largest_progress_can_be_read_and_committed() -> None:
    steps = np.random.default_rng(5).integers(1, 1 << 12, polling.MAX_SEEN)
    seen = SeenXids(5, 5 + np.cumsum(steps))
    progress = PollProgress(seen, seen, lsn=7)
    assert not progress.is_too_long
    assert PollProgress.parse(progress.to_text()) == progress
    wide = SeenXids(5, 5 + np.cumsum(np.arange(polling.MAX_SEEN // 2) * 997 % (1 << 20) + 1))
    assert PollProgress(seen, wide).is_too_long


def test_a_text_fits_into_a_line_of_a_commit() -> None:
    from ingestd.lake.delta.log_nesting import MOST_LINE_BYTES  # noqa: PLC0415

    assert polling.MOST_TEXT_BYTES <= MOST_LINE_BYTES - (1 << 20)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
        ),
        max_leaves=20,
    )
)
def test_what_json_writes_is_read(value: object) -> None:
    for ascii_only in (True, False):
        text = json.dumps(value, ensure_ascii=ascii_only)
        assert read_json(text, most_depth=99).value == value
        assert read_json(text.encode(), most_depth=99).value == value


@given(st.text() | st.text('[]{}",:\\0e-. tn'))
def test_only_a_record_error_leaves_a_reader(text: str) -> None:
    for read in (read_json, integer_of):
        with suppress(RecordError):
            read(text)


def test_a_partition_of_keys_is_one_that_exists() -> None:
    base = json.loads(PROGRESS.to_text())
    part: object
    for part in ([0, 3], [4, 4], [-1, 4], [0, 1 << 40], [0, 0], [True, 2], [0], [0, 1, -2], {}):
        assert PollProgress.parse(json.dumps(base | {"part": part})) is None, part
    for part, expected in (([3, 4, 5], KeyPartition(3, 4, 5)), ([3, 4], WHOLE)):
        found = PollProgress.parse(json.dumps(base | {"part": part}))
        assert found is not None
        assert found.key_partition == expected


@pytest.mark.parametrize(
    "ranges", ["[[4,2]]", "[[0,4],[3,6]]", "[[0,4],[6,6]]", "[[0,null],[5,6]]", "[[-1,4]]"]
)
def test_blocks_that_overlap_are_refused(ranges: str) -> None:
    left = {"7": [70, json.loads(ranges)]}
    text = json.dumps({"point": "0/8", "key": ["id"], "bytes": 9, "left": left})
    with pytest.raises(RecordError):
        SnapshotRemainder.parse(text)


def test_no_more_blocks_are_cut_than_there_are() -> None:
    text = '{"point":"0/8","key":["id"],"bytes":9,"left":{"7":[70,[[0,4000000000]]]}}'
    found = SnapshotRemainder.parse(text).splits(table("t"), [LEAF], 1)
    assert len(found) == LEAF.blocks
    assert BlockRange.parse(found[-1].where).end == 4_000_000_000

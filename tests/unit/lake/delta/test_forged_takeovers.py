"""A raw table's log that claims a takeover is believed of that table alone (I5, I8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ingestd.lake.fencing import WriterIdentity
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from ingestd.model.errors import OperatorError, TransientError
from tests.harness.compare import epochs
from tests.harness.hostile_folder import commit_of, ids_in, make_table, plant_commit
from tests.unit.lake.stores import StoreWithoutPut
from tests.unit.lake.two_tables import Attempt, log_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.attack("lake writer")

CLAIM = "slot 'shop', database shop at host"
STAMPS: dict[str, dict[str, str]] = {
    "a fence": {"ingestdFence": "true", "ingestdWriter": f"{'1' * 32} {CLAIM}"},
    "a fence of another claim": {
        "ingestdFence": "true",
        "ingestdWriter": f"{'1' * 32} slot 'other', database shop at host",
    },
    "a commit": {"ingestdWriter": f"{'1' * 32} {CLAIM}"},
    "a commit of another claim": {"ingestdWriter": f"{'1' * 32} slot 'other', database x at y"},
    "a commit without a name": {},
    "its own name": {"ingestdWriter": "OWN"},
    "a fence in its own name": {"ingestdFence": "true", "ingestdWriter": "OWN"},
}


def attempt(lake: Path, writer: WriterIdentity) -> Attempt:
    return Attempt(LocalStore(lake, Fsync()), writer)


def forge(log: Path, writer: WriterIdentity, kind: str) -> None:
    stamps = {k: v.replace("OWN", writer.name) for k, v in STAMPS[kind].items()}
    info: dict[str, Any] = {"operation": "WRITE", "timestamp": 1, "ingestdCommit": "0" * 32}
    plant_commit(log, commit_of([{"commitInfo": info | stamps}]))


@pytest.mark.parametrize("store", [LocalStore, StoreWithoutPut], ids=["by put", "by handle"])
@pytest.mark.parametrize("kind", STAMPS)
async def test_a_forged_takeover_stops_one_table(
    lake: Path, kind: str, store: type[LocalStore]
) -> None:
    writer = WriterIdentity(CLAIM)
    daemon = Attempt(store(lake, Fsync()), writer)
    await daemon.start()
    await daemon.append(100)
    forge(log_of(lake), writer, kind)
    await daemon.append(200)
    assert daemon.stopped.keys() == {"bad"}
    assert "ingestd snapshot shop public.bad" in str(daemon.stopped["bad"].remedy)
    await daemon.append(300)  # it is re-read, and fenced
    assert ids_in(lake, "good") == {100, 200, 300}
    assert ids_in(lake, "bad") == {100, 300}
    assert [row["epoch"] for row in epochs(lake)] == [1, 2, 3]


async def test_one_writer_a_takeover_while_a_table_is_forged(lake: Path) -> None:
    """What a real one leaves in `_epochs` is noticed by way of any table's log."""
    writer = WriterIdentity(CLAIM)
    daemon, other = attempt(lake, writer), attempt(lake, WriterIdentity())
    await daemon.start()
    await daemon.append(100)
    await other.start()
    with pytest.raises(TransientError, match="another ingestd has taken over"):
        await daemon.append(200)
    assert not daemon.stopped
    assert ids_in(lake, "good") == ids_in(lake, "bad") == {100}


async def test_one_writer_another_claim_is_noticed_in_epochs(lake: Path) -> None:
    first = attempt(lake, WriterIdentity(CLAIM))
    second = attempt(lake, WriterIdentity("slot 'new', database shop at host"))
    await first.start()
    await first.append(100)
    await second.start()
    with pytest.raises(OperatorError, match="another ingestd has taken over: its claim is slot"):
        await first.append(200)
    assert not first.stopped


async def test_one_writer_each_takeover_re_reads_what_came_between(lake: Path) -> None:
    """Also where one process takes the lake back again and again: no table stops for that."""
    writer = WriterIdentity(CLAIM)
    for lsn in (100, 200, 300):
        other = attempt(lake, WriterIdentity(CLAIM))
        await other.start()
        await other.append(lsn)
        daemon = attempt(lake, writer)
        await daemon.lake.open()
        forge(log_of(lake), writer, "a commit")  # as of an epoch that it began before the fence
        with pytest.raises(TransientError, match="another writer appended"):
            await daemon.fence()
        daemon = attempt(lake, writer)
        await daemon.start()
        await daemon.append(lsn + 50)
        assert not daemon.stopped
    assert ids_in(lake, "bad") == {100, 150, 200, 250, 300, 350}


@pytest.mark.parametrize("kind", ["a fence", "a commit", "its own name"])
async def test_a_forged_commit_at_each_start_is_re_read_once(lake: Path, kind: str) -> None:
    """Before the fence a real writer may have made it, so the lake is re-read, but only once."""
    before = attempt(lake, WriterIdentity(CLAIM))
    await before.start()
    await before.append(100)
    await before.lake.close()
    writer = WriterIdentity(CLAIM)
    for turn in ("first", "second"):
        daemon = attempt(lake, writer)
        await daemon.lake.open()
        forge(log_of(lake), writer, kind)
        if turn == "first":
            with pytest.raises(TransientError, match="another writer appended"):
                await daemon.fence()
    await daemon.fence()
    await daemon.append(200)
    assert daemon.stopped.keys() == {"bad"}
    assert ids_in(lake, "good") == {100, 200}


async def test_a_table_that_appears_at_each_start_is_re_read_once(lake: Path) -> None:
    before = attempt(lake, WriterIdentity(CLAIM))
    await before.start()
    await before.append(100)
    await before.lake.close()
    writer, public = WriterIdentity(CLAIM), lake / "shop/public"
    make_table(public / "new")
    for turn in ("first", "second"):
        (public / "new").rename(lake / "hidden")
        daemon = attempt(lake, writer)
        await daemon.lake.open()
        (lake / "hidden").rename(public / "new")
        if turn == "first":
            with pytest.raises(TransientError, match="another ingestd created it"):
                await daemon.fence()
    await daemon.fence()
    await daemon.append(200)
    assert daemon.stopped.keys() == {"new"}
    assert ids_in(lake, "good") == ids_in(lake, "bad") == {100, 200}

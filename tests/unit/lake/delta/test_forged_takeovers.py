"""A raw table's log that claims a takeover is believed of that table alone (I5, I8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.fencing import WriterIdentity
from ingestd.lake.store.plain_files import Fsync
from ingestd.lake.store.store import LocalStore
from ingestd.model.errors import OperatorError, TableError, TransientError
from tests.harness.compare import epochs
from tests.harness.hostile_folder import commit_of, ids_in, make_table, plant_commit
from tests.unit.lake import rows
from tests.unit.lake.stores import StoreWithoutPut

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.attack("lake writer")

GOOD, BAD = rows.make_table("good"), rows.make_table("bad")
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


class Daemon:
    """One attempt of a daemon, and the tables that stopped."""

    def __init__(self, root: Path, kind: type[LocalStore], writer: WriterIdentity) -> None:
        self.root = root
        self.lake = DeltaLake(str(root), "shop", store=kind(root, Fsync()), writer=writer)
        self.stopped: dict[str, TableError] = {}

    async def start(self) -> None:
        await self.lake.open()
        await self.fence()

    async def fence(self) -> None:
        self._record([*(await self.lake.fence()).values()])
        await self.lake.adopt("server")

    async def append(self, lsn: int) -> None:
        writer = self.lake.begin_epoch()
        for table in (GOOD, BAD):
            try:
                await writer.append_batch(rows.inserts(table, lsn, lsn))
            except TableError as error:
                self._record([error])
        await writer.commit(rows.summary(lsn, lsn + 5), self._stop)

    async def _stop(self, errors: Sequence[TableError]) -> None:
        self._record(errors)

    def _record(self, errors: Sequence[TableError]) -> None:
        self.stopped |= {error.table.name: error for error in errors}


def forge(daemon: Daemon, writer: WriterIdentity, kind: str) -> None:
    stamps = {k: v.replace("OWN", writer.name) for k, v in STAMPS[kind].items()}
    info: dict[str, Any] = {"operation": "WRITE", "timestamp": 1, "ingestdCommit": "0" * 32}
    log = daemon.root / "shop/public/bad/_delta_log"
    plant_commit(log, commit_of([{"commitInfo": info | stamps}]))


@pytest.mark.parametrize("store", [LocalStore, StoreWithoutPut], ids=["by put", "by handle"])
@pytest.mark.parametrize("kind", STAMPS)
async def test_a_forged_takeover_stops_one_table(
    lake: Path, kind: str, store: type[LocalStore]
) -> None:
    writer = WriterIdentity(CLAIM)
    daemon = Daemon(lake, store, writer)
    await daemon.start()
    await daemon.append(100)
    forge(daemon, writer, kind)
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
    daemon, other = Daemon(lake, LocalStore, writer), Daemon(lake, LocalStore, WriterIdentity())
    await daemon.start()
    await daemon.append(100)
    await other.start()
    with pytest.raises(TransientError, match="another ingestd has taken over"):
        await daemon.append(200)
    assert not daemon.stopped
    assert ids_in(lake, "good") == ids_in(lake, "bad") == {100}


async def test_one_writer_another_claim_is_noticed_in_epochs(lake: Path) -> None:
    first = Daemon(lake, LocalStore, WriterIdentity(CLAIM))
    second = Daemon(lake, LocalStore, WriterIdentity("slot 'new', database shop at host"))
    await first.start()
    await first.append(100)
    await second.start()
    with pytest.raises(OperatorError, match="another ingestd has taken over: its claim is slot"):
        await first.append(200)
    assert not first.stopped


@pytest.mark.parametrize("kind", ["a fence", "a commit", "its own name"])
async def test_a_forged_commit_at_each_start_is_re_read_once(lake: Path, kind: str) -> None:
    """Before the fence a real writer may have made it, so the lake is re-read, but only once."""
    before = Daemon(lake, LocalStore, WriterIdentity(CLAIM))
    await before.start()
    await before.append(100)
    await before.lake.close()
    writer = WriterIdentity(CLAIM)
    for attempt in ("first", "second"):
        daemon = Daemon(lake, LocalStore, writer)
        await daemon.lake.open()
        forge(daemon, writer, kind)
        if attempt == "first":
            with pytest.raises(TransientError, match="another writer appended"):
                await daemon.fence()
    await daemon.fence()
    await daemon.append(200)
    assert daemon.stopped.keys() == {"bad"}
    assert ids_in(lake, "good") == {100, 200}


async def test_a_table_that_appears_at_each_start_is_re_read_once(lake: Path) -> None:
    before = Daemon(lake, LocalStore, WriterIdentity(CLAIM))
    await before.start()
    await before.append(100)
    await before.lake.close()
    writer, public = WriterIdentity(CLAIM), lake / "shop/public"
    make_table(public / "new")
    for attempt in ("first", "second"):
        (public / "new").rename(lake / "hidden")
        daemon = Daemon(lake, LocalStore, writer)
        await daemon.lake.open()
        (lake / "hidden").rename(public / "new")
        if attempt == "first":
            with pytest.raises(TransientError, match="another ingestd created it"):
                await daemon.fence()
    await daemon.fence()
    await daemon.append(200)
    assert daemon.stopped.keys() == {"new"}
    assert ids_in(lake, "good") == ids_in(lake, "bad") == {100, 200}

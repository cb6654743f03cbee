"""When the keys of a polled table are swept, over starts of the daemon."""

from __future__ import annotations

import json

import pytest

from ingestd.model.schema import Table, TableId
from ingestd.postgres.polling.keys.lake_keys import WHOLE, KeyPartition
from ingestd.postgres.polling.polled_table import PolledTable
from ingestd.postgres.polling.position_clock import Positions
from ingestd.postgres.polling.progress import PollProgress, SeenXids
from ingestd.postgres.polling.scheduler import PollScheduler
from ingestd.postgres.settings import PollingSettings

DAY_S = 86_400.0
NOW, STARTED = 1_800_000_000.0, 500.0


def test_when_it_was_swept_survives_in_the_text() -> None:
    progress = PollProgress(
        SeenXids(7),
        SeenXids(7),
        floor="x",
        cursor="at",
        swept_at=NOW,
        key_partition=KeyPartition(3, 8, (1 << 63) - 1),
    )
    assert PollProgress.parse(progress.to_text()) == progress
    assert progress.by("id").swept_at == NOW
    older = json.loads(progress.to_text())
    del older["swept_at"]
    known = PollProgress.parse(json.dumps(older))
    assert known is not None
    assert known.swept_at == 0.0
    assert known.key_partition == KeyPartition(3, 8, (1 << 63) - 1)
    del older["part"][2]
    known = PollProgress.parse(json.dumps(older))
    assert known is not None
    assert known.key_partition == WHOLE
    for part in ([3], [3, 8, 1, 1], [3, 8, 1 << 63], [3, 8, -1], [3, 6, 1]):
        assert PollProgress.parse(json.dumps({**older, "part": part})) is None
    del older["part"]
    known = PollProgress.parse(json.dumps(older))
    assert known is not None
    assert known.key_partition == WHOLE


@pytest.mark.parametrize(
    ("swept_at", "in_s"),
    [(NOW - 0.75 * DAY_S, 0.25 * DAY_S), (NOW - 2 * DAY_S, -DAY_S), (NOW + 9 * DAY_S, DAY_S)],
    ids=["three quarters gone", "overdue", "clock was set back"],
)
def test_the_time_to_the_next_sweep_survives_a_restart(swept_at: float, in_s: float) -> None:
    settings = PollingSettings.model_validate(
        {"kind": "polling", "dsn": "postgresql:///x", "tables": ["public.*"]}
    )
    polls = PollScheduler(
        "shop",
        settings,
        Positions(),
        None,
        memory_bytes=1 << 20,
        monotonic=lambda: STARTED,
        wall=lambda: NOW,
    )
    table = Table(TableId("public", "item"), 1, ())
    polled = PolledTable(table, None, None, 1.0, DAY_S)
    polls.use_tables(
        [polled], {table.id: PollProgress(SeenXids(7), SeenXids(7), swept_at=swept_at)}
    )
    assert polls.states[table.id].sweep_at == pytest.approx(STARTED + in_s)

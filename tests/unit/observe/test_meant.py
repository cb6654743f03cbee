"""Which daemon a config means."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from ingestd.errors import OperatorError
from ingestd.observe.meant import MeantDaemon
from ingestd.observe.status import DaemonStatus, SourceStatus
from ingestd.observe.status_json import to_json
from ingestd.quantities import Address

T0 = datetime(2026, 1, 2, tzinfo=UTC)
MEANT = MeantDaemon("/lake", {"shop": "ingestd_shop", "old": None})


def told(lake: str = "/lake", **slots: str | None) -> dict[str, Any]:
    """Give the /status of a daemon with these sources."""
    sources = {name: SourceStatus(name, T0, slot=slot) for name, slot in slots.items()}
    return to_json(DaemonStatus("0", T0, sources, lake))


def test_the_daemon_of_the_config_is_the_one() -> None:
    assert MEANT.difference(told(shop="ingestd_shop", old=None)) is None
    MEANT.require(Address("127.0.0.1", 9464), told(shop="ingestd_shop", old=None))


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (told(shop="ingestd_shop"), "its sources are shop"),
        (told("/other", shop="ingestd_shop", old=None), "its lake is /other, not /lake"),
        (
            told(shop="two", old=None),
            "its source shop works by slot 'two', not slot 'ingestd_shop'",
        ),
        (told(shop="ingestd_shop", old="x"), "its source old works by slot 'x', not no slot"),
    ],
)
def test_another_is_told_by_what_differs(status: dict[str, Any], why: str) -> None:
    assert MEANT.difference(status) == why
    with pytest.raises(OperatorError, match=r"the daemon on 127\.0\.0\.1:9464 is another: "):
        MEANT.require(Address("127.0.0.1", 9464), status)


def test_a_daemon_of_an_older_version_is_known_by_its_sources() -> None:
    status = told(shop="two", old=None)
    for part in (status, *status["sources"].values()):
        part.pop("lake", None)
        part.pop("slot", None)
    assert MEANT.difference(status) is None

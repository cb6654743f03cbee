"""Which daemon a config means."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.app.factories import load
from ingestd.cli.daemon import expected_daemon
from ingestd.config.units import Address
from ingestd.http.daemon_identity import DaemonIdentity
from ingestd.model.errors import OperatorError
from ingestd.observe.status import DaemonStatus, SourceStatus
from ingestd.observe.status_json import to_json

if TYPE_CHECKING:
    from pathlib import Path

T0 = datetime(2026, 1, 2, tzinfo=UTC)
CLAIMS = {"shop": "slot 'a', database x", "old": "polling, database y"}
MEANT = DaemonIdentity("/lake", CLAIMS)


def told(lake: str = "/lake", **claims: str) -> dict[str, Any]:
    """Return the /status of a daemon with these sources."""
    sources = {name: SourceStatus(name, T0, claim=claim) for name, claim in claims.items()}
    return to_json(DaemonStatus("0", T0, sources, lake))


def test_the_daemon_of_the_config_is_the_one() -> None:
    assert MEANT.difference(told(**CLAIMS)) is None
    MEANT.require(Address("127.0.0.1", 9464), told(**CLAIMS))


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (told(shop=CLAIMS["shop"]), "its sources are shop"),
        (told("/other", **CLAIMS), "its lake is /other, not /lake"),
        (
            told(**CLAIMS | {"shop": "slot 'b', database x"}),
            "its source shop uses slot 'b', database x, not slot 'a', database x",
        ),
        (
            told(**CLAIMS | {"old": "polling, database x"}),
            "its source old uses polling, database x, not polling, database y",
        ),
    ],
)
def test_another_daemon_is_reported_by_what_differs(status: dict[str, Any], why: str) -> None:
    assert MEANT.difference(status) == why
    with pytest.raises(OperatorError, match=r"another daemon listens on 127\.0\.0\.1:9464: "):
        MEANT.require(Address("127.0.0.1", 9464), status)


def test_a_daemon_of_an_older_version_is_known_by_its_sources() -> None:
    status = told(shop="", old="")
    for part in (status, *status["sources"].values()):
        part.pop("lake", None)
        part.pop("claim", None)
    assert MEANT.difference(status) is None


def test_a_secret_that_is_part_of_a_name_is_no_difference(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        '[lake]\nuri = "/data/secretly"\n[sources.shop]\nkind = "wal"\ntables = ["public.*"]\n'
        'dsn = "postgresql://u:secretly@h/secretly"\nslot = "secretly_1"\n'
    )
    config = load(path)
    meant = expected_daemon(config)
    assert "secretly" not in str(meant)
    status = told("/data/secretly", shop="slot 'secretly_1', database secretly at h")
    shown = config.redactor.tree(status)
    assert isinstance(shown, dict)
    assert meant.difference(shown) is None

"""A soak of some seconds: that `make soak` itself works."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.harness.databases import fresh_database
from tests.harness.lives import Lives, lives_config
from tests.harness.workload import create_schema
from tests.soak.run import Soak

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.conftest import MakeDaemon


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_soak_counts_what_was_survived(
    own_postgres: PostgresServer, make_daemon: MakeDaemon, lake: Path, seed: int
) -> None:
    said: list[str] = []
    with fresh_database(own_postgres) as database:
        create_schema(database.dsn)
        daemon = make_daemon(lives_config(database, lake))
        try:
            report = Soak(Lives(database, lake, daemon, seed), own_postgres, seed, said.append).run(
                4, kills=2
            )
        finally:
            daemon.close()
    assert report.survived >= 2
    assert report.comparisons == len(said) == 2
    assert report.rows_checked > 0
    assert report.lost == report.doubled == 0
    assert any(line.startswith(f"kills survived: {report.survived} (") for line in report.lines())

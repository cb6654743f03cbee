"""Detects whether commits on the source would wait for ingestd as a synchronous standby.

Every walsender that streams and reports a flush position is a candidate, whatever it decodes, and
ingestd must report one to confirm what is durable. The server chooses by `application_name`. So the
stream uses a name that is not listed by accident
(`ingestd.postgres.connection.session.stream_name`); only `*` still matches it. Source:
PostgreSQL, src/backend/replication/syncrep.c (SyncRepGetStandbyPriority), syncrep_scanner.l.
"""

from __future__ import annotations

import re

from ingestd.model.lake_state import Notice

_METHOD = re.compile(r"\s*(?:(?:FIRST|ANY)\s+)?\d+\s*\((.*)\)\s*", re.IGNORECASE | re.DOTALL)
_NAME = re.compile(r'"((?:[^"]|"")*)"|([^\s,"()]+)')


def listed_names(setting: str) -> list[str]:
    """Return the names in `synchronous_standby_names`; each except `*` names one standby."""
    method = _METHOD.fullmatch(setting)
    listed = setting if method is None else method[1]
    return [quoted.replace('""', '"') or bare for quoted, bare in _NAME.findall(listed)]


def synchronous_notices(setting: str, application: str) -> tuple[Notice, ...]:
    """Return a notice if a stream of that `application_name` may be a synchronous standby."""
    names = listed_names(setting)
    if "*" not in names and application.lower() not in [name.lower() for name in names]:
        return ()
    return (
        Notice(
            "source.synchronous",
            f"synchronous_standby_names = {setting!r} lets the server choose ingestd as a "
            "synchronous standby: commits then wait until their changes are durable in the lake",
            "ALTER SYSTEM SET synchronous_standby_names = 'FIRST 1 (...)'; with the names of the "
            "physical standbys only; SELECT pg_catalog.pg_reload_conf();",
        ),
    )

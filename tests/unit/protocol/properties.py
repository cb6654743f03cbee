"""What design section 3 asks of every state of the model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from tests.unit.protocol.protocol import Epoch, Log, Position, Protocol, Rows, World


def fault_of(protocol: Protocol, world: World) -> str | None:
    """Say which invariant a state breaks, and how; None if it breaks none."""
    return _fault_of(protocol, world.logs, world.confirmed, world.is_lost)


@lru_cache(maxsize=1 << 16)
def _fault_of(
    protocol: Protocol,
    logs: tuple[Log, ...],
    confirmed: int,
    is_lost: bool,  # noqa: FBT001 - lru_cache
) -> str | None:
    return next(_faults(protocol, logs, confirmed, is_lost=is_lost), None)


def _faults(
    protocol: Protocol, logs: tuple[Log, ...], confirmed: int, *, is_lost: bool
) -> Iterator[str]:
    own, *raws = logs
    epochs = [c for c in own if isinstance(c, Epoch)]
    ends = [0, *(epoch.end for epoch in epochs)]
    durable = max([*ends, *(c.at for c in own if isinstance(c, Position))])
    if confirmed > durable:
        yield f"I1: {confirmed} is confirmed, {durable} is durable"
    if is_lost:
        yield "a slot looks as if it were beyond the lake, and nothing was lost"
    for number, (epoch, before) in enumerate(zip(epochs, ends, strict=False), start=1):
        if not before <= epoch.first < epoch.end:
            found = f"{epoch.first} to {epoch.end}, the one before ends at {before}"
            yield f"I2: epoch {number} is {found}"
    for table, raw in zip(protocol.tables, raws, strict=True):
        commits = [(version, c) for version, c in enumerate(raw) if isinstance(c, Rows)]
        rows = sorted(lsn for _, c in commits for lsn in c.lsns)
        if len(set(rows)) < len(rows):
            yield f"I3: table {table} has a row twice: {rows}"
        written = {n for n, tables in enumerate(protocol.transactions) if table in tables}
        lacking = {lsn for lsn in written if lsn < durable} - set(rows)
        if lacking:
            yield f"I3: table {table} lacks {lacking}, {durable} is durable"
        for version, commit in commits:
            yield from _faults_of(table, version, commit, epochs, ends)


def _faults_of(
    table: int, version: int, commit: Rows, epochs: list[Epoch], ends: list[int]
) -> Iterator[str]:
    number = commit.epoch
    what = f"table {table} has rows of epoch {number} at {commit.lsns}"
    if number > len(epochs) + 1:
        yield f"I2: {what}, the last is {len(epochs)}"
    elif number <= len(epochs):
        if not all(ends[number - 1] <= lsn < ends[number] for lsn in commit.lsns):
            yield f"I2: {what}, which ends at {ends[number]}"
        if dict(epochs[number - 1].versions).get(table, -1) < version:
            yield f"I4: {what} that its version does not hold"
    elif any(lsn < ends[-1] for lsn in commit.lsns):
        yield f"I2: {what}, the one before ends at {ends[-1]}"
    for listing, epoch in enumerate(epochs, start=1):
        if dict(epoch.versions).get(table, -1) >= version and number > listing:
            yield f"I4: {what}, and epoch {listing} shows them"

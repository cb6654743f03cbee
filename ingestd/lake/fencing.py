"""The identity of a lake's writer: a process, and the claim on the source that it holds (I5)."""

from __future__ import annotations

import re
import uuid
from collections import Counter

from ingestd.model.errors import OperatorError
from ingestd.model.lake_state import Notice

SEPARATE = "give one of the two another source name or lake.uri"
MOST_CONFLICTS = 8
"""For how many conflicts in one raw table's log a process re-reads the lake: with the pauses in
between, longer than a store takes to execute a request that it did not answer."""
_SLOT = re.compile(r"slot '([a-z0-9_]+)'")
_ROLE = re.compile(r"""\Apolling as role (?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")


class WriterIdentity:
    """One process's work on a source, from when it is built until it is rebuilt.

    `claim`: the claim in readable form: the slot, then the database's address. `name`: the
    signature in commits. `has_fenced`: whether this process has fenced the lake; then any other
    signature on the newest commit is a later one. For each log it keeps the version of a failed
    commit that may still appear, as a request may reach the store after its sender gave up.
    """

    def __init__(self, claim: str = "") -> None:
        self.claim = claim
        self.name = f"{uuid.uuid4().hex} {claim}".rstrip()
        self.has_fenced = False
        self._doubtful: dict[str, int] = {}
        self._alleged: set[str] = set()
        self._conflicts: Counter[str] = Counter()

    def doubt(self, folder: str, version: int) -> None:
        """Record that a failed commit of this version of a log may still appear."""
        self._doubtful[folder] = version

    def is_in_doubt(self, folder: str, version: int) -> bool:
        """Return whether a failed commit may still appear above this newest version."""
        return self._doubtful.get(folder, -1) > version

    def is_first_allegation(self, folder: str) -> bool:
        """Return whether this is the first takeover that this raw table's log alleges.

        A writer that was fenced just now may have committed there before, so the lake is re-read
        once. From then on all logs have a fence of this process.
        """
        is_first = folder not in self._alleged
        self._alleged.add(folder)
        return is_first

    def may_reread(self, folder: str) -> bool:
        """Count a conflict in this raw table's log; return whether the lake is re-read for it."""
        self._conflicts[folder] += 1
        return self._conflicts[folder] <= MOST_CONFLICTS

    def forget_conflicts(self, folder: str) -> None:
        """Record a commit in this raw table's log: only conflicts in a row count."""
        self._conflicts.pop(folder, None)

    def forget_allegations_after(self, signed: str | None) -> None:
        """Let alleged takeovers count as first ones again if another wrote `_epochs` last."""
        if signed not in {None, self.name}:
            self._alleged.clear()

    def other_claim(self, signed: str | None) -> str | None:
        """Return the claim of a commit's signer, None if this claim proves that it has ended.

        It has ended if it held the same slot, or polled the same database as the same role. (The
        server is not compared, as its address can be spelled in several ways.)
        """
        if not self.claim or signed in {None, self.name}:
            return None
        _, _, other = str(signed).partition(" ")
        return other if other and not _is_same(other, self.claim) else None

    def refuse_if_taken_over(self, signed: str | None, lake: str) -> None:
        """Raise OperatorError if a writer that may still run has signed a commit since the fence.

        Two running writers would fence each other in a loop, so only a newly started process may
        take over.
        """
        other = self.other_claim(signed)
        if not self.has_fenced or other is None:
            return
        raise OperatorError(
            f"lake {lake}: another ingestd has taken over: its claim is {other}, that of "
            f"this one {self.claim}",
            remedy=f"{SEPARATE}; then restart the one that should write here: it takes over",
        )

    def takes_over(self, signed: str | None, lake: str) -> Notice | None:
        """Return a notice of the writer whose lake is taken over, if that writer may still run."""
        other = self.other_claim(signed)
        if self.has_fenced or other is None:
            return None
        return Notice(
            "lake.taken_over",
            f"lake {lake} was last written by {other}; now {self.claim} takes it over",
            f"if this was not intended, {SEPARATE}{drop_of(other)}",
        )


def drop_of(claim: str) -> str:
    """Return how to drop the slot of an unused claim; empty if the claim has none."""
    slot = _SLOT.match(claim)
    if slot is None:
        return ""
    return (
        f"; else drop its slot, which retains WAL: SELECT "
        f"pg_catalog.pg_drop_replication_slot('{slot[1]}');"
    )


def _is_same(one: str, other: str) -> bool:
    """Return whether only one daemon can hold both. Older versions signed without a role."""
    roles = {found[0] for claim in (one, other) if (found := _ROLE.match(claim))}
    one, other = (_ROLE.sub("polling", claim, count=1) for claim in (one, other))
    return len(roles) < 2 and _held(one) == _held(other)  # noqa: PLR2004


def _held(claim: str) -> str:
    """Return the part of a claim that only one daemon can hold: the slot, else the database."""
    slot, _, _ = claim.partition(",")
    return slot if _SLOT.match(claim) else claim.partition(" at ")[0]

"""Who writes a source's lake: a process, and the claim on the source that it works by (I5)."""

from __future__ import annotations

import uuid

from ingestd.errors import OperatorError


class Writer:
    """One process's work on a source, from when it is built until it is built anew.

    `claim`: names the claim for people: the slot, then where its database is. `name`: what commits
    are signed with. `has_fenced`: whether it has fenced the lake: whoever else signs the newest
    commit came later.
    """

    def __init__(self, claim: str = "") -> None:
        self.claim = claim
        self.name = f"{uuid.uuid4().hex} {claim}".rstrip()
        self.has_fenced = False

    def refuse_if_taken_over(self, newest: str | None, lake: str) -> None:
        """Raise OperatorError if one who may live has signed the last commit since the fence.

        The two would take the lake from each other for ever. Who works by the same slot is gone,
        as this one has it now (one server may be spelled in several ways, so the slot alone is
        compared). And a process that is started is somebody's will: it takes over.
        """
        if not self.has_fenced or newest in {None, self.name}:
            return
        _, _, other = str(newest).partition(" ")
        if not other or _slot_of(other) == _slot_of(self.claim):
            return
        raise OperatorError(
            f"lake {lake}: another ingestd has taken over: it works by {other}, this one by "
            f"{self.claim}",
            remedy="give one of the two another source name or lake.uri; then start anew the one "
            "that is to write here: it takes over",
        )


def _slot_of(claim: str) -> str:
    return claim.partition(",")[0]

"""Who writes a source's lake: a process, and the claim on the source that it works by (I5)."""

from __future__ import annotations

import uuid

from ingestd.errors import OperatorError
from ingestd.sink.commit_actions import writer_of


class Writer:
    """One process's work on a source, from when it is built until it is built anew.

    `claim`: names the claim, equal for all who exclude each other by it. `name`: what commits are
    signed with. `has_fenced`: whether it has fenced the lake: whoever else signs the newest commit
    came later.
    """

    def __init__(self, claim: str = "") -> None:
        self.claim = claim
        self.name = f"{uuid.uuid4().hex} {claim}".rstrip()
        self.has_fenced = False

    def refuse_if_taken_over(self, newest: str | None, lake: str) -> None:
        """Raise OperatorError if one who may live has made the `newest` commit since the fence.

        The two would take the lake from each other for ever. Who works by the same claim is gone,
        as this one has it now. And a process that is started is somebody's will: it takes over.
        """
        name = None if newest is None else writer_of(newest)
        if not self.has_fenced or name in {None, self.name}:
            return
        _, _, other = str(name).partition(" ")
        if other in {"", self.claim}:
            return
        raise OperatorError(
            f"lake {lake}: another ingestd has taken over: it works by {other}, this one by "
            f"{self.claim}",
            remedy="give one of the two another source name or lake.uri; then start anew the one "
            "that is to write here: it takes over",
        )

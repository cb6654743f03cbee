"""Who writes a source's lake: a process, and the claim on the source that it works by (I5)."""

from __future__ import annotations

import re
import uuid

from ingestd.model.errors import OperatorError
from ingestd.model.lake_state import Notice

SEPARATE = "give one of the two another source name or lake.uri"
_SLOT = re.compile(r"slot '([a-z0-9_]+)'")
_ROLE = re.compile(r"""\Apolling as role (?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")


class WriterIdentity:
    """One process's work on a source, from when it is built until it is rebuilt.

    `claim`: names the claim for people: the slot, then where its database is. `name`: what commits
    are signed with. `has_fenced`: whether it has fenced the lake: whoever else signs the newest
    commit came later. For each log it keeps the version of a commit that failed without its being
    sure that it never comes to be: a request may reach the store after its sender gave it up.
    """

    def __init__(self, claim: str = "") -> None:
        self.claim = claim
        self.name = f"{uuid.uuid4().hex} {claim}".rstrip()
        self.has_fenced = False
        self._doubtful: dict[str, int] = {}

    def doubt(self, folder: str, version: int) -> None:
        """Record that a commit of this version of a log may still come to be."""
        self._doubtful[folder] = version

    def is_in_doubt(self, folder: str, version: int) -> bool:
        """Whether one may, where the newest version is this: nothing can replace a commit."""
        return self._doubtful.get(folder, -1) > version

    def other_claim(self, signed: str | None) -> str | None:
        """Name the claim of who signed a commit, unless this one's claim says that he is gone.

        That is so of the same slot, or the same database by polling as the same role. (One server
        may be spelled in several ways: it is not compared.)
        """
        if not self.claim or signed in {None, self.name}:
            return None
        _, _, other = str(signed).partition(" ")
        return other if other and not _is_same(other, self.claim) else None

    def refuse_if_taken_over(self, signed: str | None, lake: str) -> None:
        """Raise OperatorError if one who may live has signed a commit since the fence.

        The two would take the lake from each other indefinitely. A process that is started is
        someone's will: it takes over.
        """
        other = self.other_claim(signed)
        if not self.has_fenced or other is None:
            return
        raise OperatorError(
            f"lake {lake}: another ingestd has taken over: it works by {other}, this one by "
            f"{self.claim}",
            remedy=f"{SEPARATE}; then start anew the one that is to write here: it takes over",
        )

    def takes_over(self, signed: str | None, lake: str) -> Notice | None:
        """Say from whom the lake is taken over by the fence to come, if that one may live."""
        other = self.other_claim(signed)
        if self.has_fenced or other is None:
            return None
        return Notice(
            "lake.taken_over",
            f"lake {lake} was last written by {other}; now {self.claim} takes it over",
            f"if that was not meant, {SEPARATE}{drop_of(other)}",
        )


def drop_of(claim: str) -> str:
    """Say how the slot of a claim goes, if nobody works by it any more; empty for none."""
    slot = _SLOT.match(claim)
    if slot is None:
        return ""
    return (
        f"; else drop its slot, which keeps WAL: SELECT "
        f"pg_catalog.pg_drop_replication_slot('{slot[1]}');"
    )


def _is_same(one: str, other: str) -> bool:
    """Return whether one daemon alone can have both. Versions before signed without a role."""
    roles = {found[0] for claim in (one, other) if (found := _ROLE.match(claim))}
    one, other = (_ROLE.sub("polling", claim, count=1) for claim in (one, other))
    return len(roles) < 2 and _held(one) == _held(other)  # noqa: PLR2004


def _held(claim: str) -> str:
    """Return of a claim what one daemon alone can have: the slot, else the database."""
    slot, _, _ = claim.partition(",")
    return slot if _SLOT.match(claim) else claim.partition(" at ")[0]

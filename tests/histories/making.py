"""Histories made up at random: a kind of table, moves, and the transactions they are made in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.histories.dice import Dice, write
from tests.histories.steps import DOWN, History, Phase, SessionStatement, Weather
from tests.histories.worlds import WORLDS, World

if TYPE_CHECKING:
    from collections.abc import Sequence

ALONE = ("VACUUM", "REINDEX", "CLUSTER")
"""Begin statements that can't be in a transaction, or better are not."""


def make_weather(seed: int) -> tuple[Weather, ...]:
    """Make up how the daemon is in each phase of a life."""
    dice = Dice(seed)
    up: tuple[Weather, ...] = ("up", "checked")
    phases = dice.some(1, 1, 1, 2, 2, 3)
    return tuple(dice.some(*up, *DOWN) for _ in range(phases))


def make_history(name: str, seed: int, phases: int, worlds: Sequence[World] = WORLDS) -> History:
    """Make up a history of so many phases."""
    dice = Dice(seed)
    world = dice.choices(worlds, [w.weight for w in worlds])[0]
    made: list[Phase] = []
    for number in range(phases):
        found: list[list[SessionStatement]] = []
        for _ in range(dice.some(0, 1, 1, 2) if phases > 1 else dice.some(1, 1, 1, 1, 2)):
            found.append(_in_transactions(dice, dice.choice(world.moves)(dice), f"{number}"))
            if dice.chance(0.3):
                found.append([SessionStatement(dice.some("a", "b"), write(dice))])
        made.append(tuple(_merged(dice, found)))
    return History(f"{name} ({world.name})", world.create, tuple(made))


def _merged(dice: Dice, parts: list[list[SessionStatement]]) -> list[SessionStatement]:
    """Put them one after another, or (sometimes) those of different sessions among each other."""
    merged: list[SessionStatement] = []
    for part in parts:
        sessions = {s.session for s in part} & {s.session for s in merged[-3:]}
        if sessions or not merged or dice.chance(0.7):
            merged += part
            continue
        tail = merged[-2:]
        del merged[-2:]
        merged += [tail[0], *part[:1], *tail[1:], *part[1:]]
    return merged


def _in_transactions(dice: Dice, statements: Sequence[str], number: str) -> list[SessionStatement]:
    """Execute the statements of a move in transactions of some form."""
    session = dice.some("a", "a", "b")
    other = "c"
    steps = [
        SessionStatement(other, text[1:])
        if text.startswith("@")
        else SessionStatement(session, text)
        for text in statements
    ]
    is_split = any(s.session != session for s in steps)
    own = [s.sql for s in steps]
    if any(t.startswith(ALONE) or t.endswith("CONCURRENTLY") for t in own):
        return [s for s in steps if not s.sql.endswith(" l")]

    def alone(*texts: str) -> list[SessionStatement]:
        return [SessionStatement(session, text) for text in texts]

    if is_split:
        begin = alone("BEGIN", "SELECT pg_current_xact_id()")
        return [steps[0], *begin, *steps[1:], *alone("COMMIT")] if dice.chance(0.8) else steps
    if "SAVEPOINT l" in own:
        return _prepared(dice, steps, f"{{h}}_{session}{number}_{dice.randrange(10_000)}")
    cut = dice.randrange(len(steps) + 1)
    commit = alone("COMMIT")
    early = alone("BEGIN", "SELECT pg_current_xact_id()")
    gid = f"{{h}}_{session}{number}_{dice.randrange(10_000)}"
    ways: dict[str, tuple[int, list[SessionStatement]]] = {
        "none": (4, steps),
        "one": (2, [*alone("BEGIN"), *steps, *alone(dice.some("COMMIT", "COMMIT", "ROLLBACK"))]),
        "subtransaction": (
            1,
            [
                *dice.some(alone("BEGIN"), early),
                *alone("SAVEPOINT s"),
                *steps[:cut],
                *alone("RELEASE s"),
                *steps[cut:],
                *commit,
            ],
        ),
        "undone": (
            1,
            [
                *alone("BEGIN"),
                *steps[:cut],
                *alone("SAVEPOINT s"),
                *steps[cut:],
                *alone("ROLLBACK TO s"),
                *dice.some([], alone(write(dice))),
                *commit,
            ],
        ),
        "block": (1, alone(_block(own, cut))),
        "early": (1, [*early, SessionStatement(other, write(dice)), *steps, *commit]),
        "prepared": (1, _prepared(dice, steps, gid)),
        "long": (1, _beside_a_long_one(dice, steps)),
    }
    return dice.choices([w for _, w in ways.values()], [n for n, _ in ways.values()])[0]


def _prepared(dice: Dice, steps: list[SessionStatement], gid: str) -> list[SessionStatement]:
    """Commit in two phases, or give up, with a change by another session between."""
    session = steps[0].session
    between = [SessionStatement("c", write(dice))] if dice.chance(0.3) else []
    end = dice.some("COMMIT", "COMMIT", "ROLLBACK")
    return [
        SessionStatement(session, "BEGIN"),
        *steps,
        SessionStatement(session, f"PREPARE TRANSACTION '{gid}'"),
        *between,
        SessionStatement(session, f"{end} PREPARED '{gid}'"),
    ]


def _beside_a_long_one(dice: Dice, steps: list[SessionStatement]) -> list[SessionStatement]:
    """Have another session write before, and commit afterwards or when the history is over."""
    long = "d"
    end = [SessionStatement(long, write(dice)), SessionStatement(long, "COMMIT")]
    return [
        SessionStatement(long, "BEGIN"),
        SessionStatement(long, write(dice)),
        *steps,
        *dice.some([], end),
    ]


def _block(statements: Sequence[str], cut: int) -> str:
    """Write them as a block of PL/pgSQL: those before the cut in a block with EXCEPTION."""
    inner = " ".join(f"{text};" for text in statements[:cut])
    rest = " ".join(f"{text};" for text in statements[cut:])
    caught = f"BEGIN {inner} EXCEPTION WHEN others THEN NULL; END;" if inner else ""
    return f"DO $$ BEGIN {caught} {rest} END $$"

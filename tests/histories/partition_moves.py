"""DDL on a table's partitions. Those of a range are called by it: `{h}_p1` has keys 10 to 19."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.histories.dice import COLUMNS, Dice, harmless, insert, write, writes

if TYPE_CHECKING:
    from tests.histories.table_moves import Move

FREE = 3
"""The range that no partition has at first."""
OTHER_ROOT = "{h}_q"


def leaf(number: int) -> str:
    return f"{{h}}_p{number}"


def bounds(number: int) -> str:
    return f"FOR VALUES FROM ({10 * number}) TO ({10 * number + 10})"


def attach(number: int, root: str = "{h}_t") -> str:
    return f"ALTER TABLE {root} ATTACH PARTITION {leaf(number)} {bounds(number)}"


def detach(number: int, root: str = "{h}_t") -> str:
    return f"ALTER TABLE {root} DETACH PARTITION {leaf(number)}"


def load(dice: Dice, number: int, table: str = "") -> str:
    return insert(dice, table or leaf(number), 10 * number, 10 * number + 10)


def load_frozen(number: int) -> str:
    """Only where the table was made, or truncated, in the same transaction."""
    rows = "".join(f"{10 * number + n}\\tfrozen\\n" for n in (1, 4))
    return f"COPY {leaf(number)} (id, note) FROM PROGRAM 'printf \"{rows}\"' (FREEZE)"


def chosen(dice: Dice) -> int:
    return dice.randrange(FREE)


def brought(dice: Dice) -> list[str]:
    """Attach a table that was made, and perhaps loaded, in some way before."""
    make = f"CREATE TABLE {leaf(FREE)} (LIKE {{h}}_t INCLUDING ALL)"
    ways: list[list[str]] = [
        [],
        [load(dice, FREE)],
        [load(dice, FREE), write(dice, leaf(FREE))],
        ["SAVEPOINT l", load(dice, FREE), "RELEASE l"],
        [f"@{load(dice, FREE)}"],
        [load_frozen(FREE)],
        [load(dice, FREE), harmless(dice, leaf(FREE))],
        [load(dice, FREE), f"DELETE FROM {leaf(FREE)}"],
        [load(dice, FREE), f"TRUNCATE {leaf(FREE)}", load(dice, FREE)],
    ]
    after = [[], writes(dice), [f"UPDATE {{h}}_t SET note = 'seen' WHERE id >= {10 * FREE}"]]
    return [make, *dice.choice(ways), attach(FREE), *dice.choice(after)]


def made(dice: Dice) -> list[str]:
    """Create a partition as such."""
    moves = [f"CREATE TABLE {leaf(FREE)} PARTITION OF {{h}}_t {bounds(FREE)}", load(dice, FREE)]
    after = [[], writes(dice), [f"DROP TABLE {leaf(FREE)}"], [detach(FREE)]]
    after += [[f"TRUNCATE {leaf(FREE)}", *more] for more in ([], [load(dice, FREE)])]
    return [*moves, *dice.choice(after)]


def out_and_in(dice: Dice) -> list[str]:
    number = chosen(dice)
    between = dice.some(
        [],
        [load(dice, number)],
        [write(dice, leaf(number))],
        [f"TRUNCATE {leaf(number)}", load(dice, number)],
        [f"DELETE FROM {leaf(number)}"],
        [harmless(dice, leaf(number))],
    )
    concurrently = dice.some("", "", " CONCURRENTLY")
    moves = [detach(number) + concurrently, *between]
    return [*moves, *dice.some([attach(number)], [attach(number), *writes(dice)], [])]


def dropped(dice: Dice) -> list[str]:
    number = chosen(dice)
    again = f"CREATE TABLE {leaf(number)} PARTITION OF {{h}}_t {bounds(number)}"
    return [
        *dice.some([], [load(dice, number)]),
        f"DROP TABLE {leaf(number)}",
        *dice.some([], [again, load(dice, number)]),
    ]


def reloaded(dice: Dice) -> list[str]:
    """Truncate a partition, which is not sent; its file is another then, like after others."""
    number = chosen(dice)
    after = [harmless(dice, leaf(number)) for _ in range(dice.randrange(3))]
    more = dice.some(
        [],
        [load(dice, number)],
        [load(dice, number), write(dice, leaf(number))],
        [load_frozen(number)],
    )
    return [f"TRUNCATE {leaf(number)}", *more, *after, *dice.some([], writes(dice, most=1))]


def replaced(dice: Dice) -> list[str]:
    """Swap a partition for another table by renames."""
    number = chosen(dice)
    new = f"{{h}}_n{number}"
    return [
        f"CREATE TABLE {new} (LIKE {{h}}_t INCLUDING ALL)",
        load(dice, number, new),
        detach(number),
        f"ALTER TABLE {leaf(number)} RENAME TO {{h}}_o{number}",
        f"ALTER TABLE {new} RENAME TO {{h}}_p{number}",
        attach(number),
        *dice.some([], writes(dice), [f"DROP TABLE {{h}}_o{number}"]),
    ]


def moved(dice: Dice) -> list[str]:
    """Move a partition to the other root, and perhaps back."""
    number = chosen(dice)
    back = [detach(number, OTHER_ROOT), attach(number)]
    return [
        detach(number),
        *dice.some([], [load(dice, number)], [f"TRUNCATE {leaf(number)}"]),
        attach(number, OTHER_ROOT),
        *dice.some([], writes(dice, OTHER_ROOT), [load(dice, number)]),
        *dice.some([], back, [*back, load(dice, number)]),
    ]


def unlogged(dice: Dice) -> list[str]:
    number = chosen(dice)
    return [
        f"ALTER TABLE {leaf(number)} SET UNLOGGED",
        write(dice, leaf(number)),
        f"ALTER TABLE {leaf(number)} SET LOGGED",
        *dice.some([], [harmless(dice, leaf(number))], [load(dice, number)]),
    ]


def leaf_altered(dice: Dice) -> list[str]:
    number = chosen(dice)
    what = dice.some("FULL", "NOTHING", "DEFAULT")
    return [
        dice.some(
            f"ALTER TABLE {leaf(number)} REPLICA IDENTITY {what}",
            f"ALTER TABLE {leaf(number)} RENAME TO {{h}}_renamed",
            f"ALTER TABLE {leaf(number)} SET SCHEMA elsewhere",
            harmless(dice, leaf(number)),
        ),
        *writes(dice),
    ]


def branch_brought(dice: Dice) -> list[str]:
    """Attach a partitioned table with rows in its partition."""
    return [
        f"CREATE TABLE {leaf(FREE)} ({COLUMNS}, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
        f"CREATE TABLE {{h}}_b PARTITION OF {leaf(FREE)} FOR VALUES FROM (30) TO (35)",
        *dice.some([], [insert(dice, "{h}_b", 30, 35)]),
        attach(FREE),
        *dice.some([], [insert(dice, "{h}_b", 30, 35)], writes(dice)),
    ]


def captured_attached(dice: Dice) -> list[str]:
    """Have a captured table be a partition for a time."""
    there = f"ALTER TABLE {{h}}_t ATTACH PARTITION {{h}}_s {bounds(FREE)}"
    return [
        there,
        *dice.some([], [insert(dice, "{h}_t", 30, 40)], writes(dice, "{h}_s")),
        *dice.some([], ["ALTER TABLE {h}_t DETACH PARTITION {h}_s"]),
        *dice.some([], [insert(dice, "{h}_s", 30, 40)]),
    ]


def root_truncated(dice: Dice) -> list[str]:
    number = chosen(dice)
    return ["TRUNCATE {h}_t", load(dice, number), *dice.some([], [f"TRUNCATE {leaf(number)}"])]


PARTITION_MOVES: tuple[Move, ...] = (
    brought,
    brought,
    brought,
    made,
    out_and_in,
    out_and_in,
    dropped,
    reloaded,
    reloaded,
    reloaded,
    replaced,
    unlogged,
    leaf_altered,
    branch_brought,
    root_truncated,
)
ROOT_MOVES: tuple[Move, ...] = (
    moved,
    moved,
    captured_attached,
    captured_attached,
    *PARTITION_MOVES,
)
"""Of a table that has another one like it beside it."""

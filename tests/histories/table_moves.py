"""DDL on one table, with writes between: what goes there and back, what comes and goes.

A move gives the statements of one session; `@` before one has another session execute it.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.histories.dice import COLUMNS, TABLE, Dice, harmless, insert, write, writes

Move = Callable[[Dice], list[str]]


def column_added(dice: Dice) -> list[str]:
    kind = dice.some("int", "int DEFAULT 5", "text DEFAULT 'd'", "float8 DEFAULT random()")
    moves = [f"ALTER TABLE {TABLE} ADD x {kind}"]
    if "float8" not in kind and dice.chance(0.7):
        moves.append(f"UPDATE {TABLE} SET x = '7' WHERE id % 3 = {dice.randrange(3)}")
    moves += writes(dice)
    if dice.chance(0.4):
        moves.append(f"ALTER TABLE {TABLE} DROP x")
    elif dice.chance(0.4):
        moves += [f"ALTER TABLE {TABLE} RENAME x TO y", *writes(dice)]
    elif dice.chance(0.3):
        moves += [f"ALTER TABLE {TABLE} ALTER x DROP DEFAULT", harmless(dice)]
    return moves


def column_remade(dice: Dice) -> list[str]:
    kind = dice.some("int", "bigint", "text", "int DEFAULT 3")
    return [
        f"ALTER TABLE {TABLE} DROP n",
        *writes(dice, most=1),
        f"ALTER TABLE {TABLE} ADD n {kind}",
        *writes(dice),
    ]


def column_renamed(dice: Dice) -> list[str]:
    column = dice.some("note", "n")
    value = "'seen'" if column == "note" else "77"
    moves = [
        f"ALTER TABLE {TABLE} RENAME {column} TO other",
        f"UPDATE {TABLE} SET other = {value} WHERE id % 4 = {dice.randrange(4)}",
    ]
    if dice.chance(0.8):
        moves.append(f"ALTER TABLE {TABLE} RENAME other TO {column}")
    return [*moves, *writes(dice, most=1)]


def columns_swapped(dice: Dice) -> list[str]:
    return [
        f"ALTER TABLE {TABLE} RENAME note TO spare",
        f"ALTER TABLE {TABLE} RENAME big TO note",
        *writes(dice, most=1),
        f"ALTER TABLE {TABLE} RENAME spare TO big",
        *writes(dice, most=1),
    ]


def column_retyped(dice: Dice) -> list[str]:
    kinds = ("bigint", "text", "numeric(12,2)", "smallint USING n::smallint", "int USING n + 1")
    moves = []
    for kind in dice.some_of(kinds, 2):
        moves += [f"ALTER TABLE {TABLE} ALTER n TYPE {kind}", *writes(dice, most=1)]
    return [*moves, *dice.some([], [harmless(dice)])]


def column_generated(dice: Dice) -> list[str]:
    """Have a column that the server does not send, then does."""
    return [
        f"ALTER TABLE {TABLE} ADD x int GENERATED ALWAYS AS (id * 2) STORED",
        *writes(dice, most=1),
        *dice.some([], [f"ALTER TABLE {TABLE} ALTER x DROP EXPRESSION", *writes(dice)]),
    ]


def key_retyped(dice: Dice) -> list[str]:
    return [f"ALTER TABLE {TABLE} ALTER id TYPE {dice.some('bigint', 'int')}", *writes(dice)]


def schema_changed(dice: Dice) -> list[str]:
    away = dice.some("other", "elsewhere")
    moves = [f"ALTER TABLE public.{TABLE} SET SCHEMA {away}", *writes(dice, f"{away}.{TABLE}")]
    if dice.chance(0.85):
        moves.append(f"ALTER TABLE {away}.{TABLE} SET SCHEMA public")
    return [*moves, *writes(dice, most=1)]


def renamed(dice: Dice) -> list[str]:
    moves = [f"ALTER TABLE {TABLE} RENAME TO {{h}}_u", *writes(dice, "{h}_u")]
    if dice.chance(0.8):
        moves.append("ALTER TABLE {h}_u RENAME TO {h}_t")
    return [*moves, *writes(dice, most=1)]


def swapped(dice: Dice) -> list[str]:
    return [
        f"CREATE TABLE {{h}}_v ({COLUMNS}, PRIMARY KEY (id))",
        *writes(dice, "{h}_v"),
        f"ALTER TABLE {TABLE} RENAME TO {{h}}_w",
        "ALTER TABLE {h}_v RENAME TO {h}_t",
        *writes(dice, dice.some(TABLE, "{h}_w")),
        *dice.some([], ["DROP TABLE {h}_w"], ["ALTER TABLE {h}_w RENAME TO {h}_v"]),
    ]


def made_again(dice: Dice) -> list[str]:
    key = dice.some("PRIMARY KEY (id)", "PRIMARY KEY (id)", "UNIQUE (id)")
    return [
        *writes(dice, most=1),
        f"DROP TABLE {TABLE}",
        f"CREATE TABLE {TABLE} ({COLUMNS}, {key})",
        *writes(dice),
    ]


def published_again(dice: Dice) -> list[str]:
    unlogged = [
        f"ALTER TABLE {TABLE} SET UNLOGGED",
        *writes(dice, most=1),
        f"ALTER TABLE {TABLE} SET LOGGED",
    ]
    filtered = [
        f'ALTER PUBLICATION "{{p}}" ADD TABLE {TABLE} WHERE (id < 10)',
        *writes(dice),
        f'ALTER PUBLICATION "{{p}}" DROP TABLE {TABLE}',
    ]
    listed = [
        f'ALTER PUBLICATION "{{p}}" ADD TABLE {TABLE} (id, note)',
        *writes(dice),
        f'ALTER PUBLICATION "{{p}}" DROP TABLE {TABLE}',
    ]
    return [
        f'ALTER PUBLICATION "{{p}}" DROP TABLE {TABLE}',
        *dice.some(writes(dice), writes(dice), unlogged, filtered, listed),
        f'ALTER PUBLICATION "{{p}}" ADD TABLE {TABLE}',
        *writes(dice, most=1),
    ]


def truncated(dice: Dice) -> list[str]:
    return [f"TRUNCATE {TABLE}", insert(dice), *dice.some([], [harmless(dice)])]


def untouched(dice: Dice) -> list[str]:
    return [harmless(dice), write(dice), harmless(dice)]


def identified(dice: Dice) -> list[str]:
    moves: list[str] = []
    for kind in dice.some_of(("FULL", "DEFAULT", "NOTHING", "FULL"), 2):
        moves += [f"ALTER TABLE {TABLE} REPLICA IDENTITY {kind}", *writes(dice)]
    if dice.chance(0.6):
        moves += [f"ALTER TABLE {TABLE} REPLICA IDENTITY {dice.some('DEFAULT', 'FULL')}"]
    return moves


def key_remade(dice: Dice) -> list[str]:
    doubles = [
        f"INSERT INTO {TABLE} (id, note) VALUES ({dice.id()}, 'one'), ({dice.id()}, 'two')",
        f"DELETE FROM {TABLE} a USING {TABLE} b WHERE a.id = b.id AND a.ctid < b.ctid",
    ]
    how = dice.some("", "", " DEFERRABLE", " DEFERRABLE INITIALLY DEFERRED")
    return [
        f"ALTER TABLE {TABLE} DROP CONSTRAINT {{h}}_t_pkey",
        *dice.some(doubles, writes(dice, most=1)),
        f"ALTER TABLE {TABLE} ADD PRIMARY KEY (id){how}",
        *writes(dice, most=1),
    ]


def key_moved(dice: Dice) -> list[str]:
    return [
        f"ALTER TABLE {TABLE} ADD k int GENERATED BY DEFAULT AS IDENTITY",
        *writes(dice, most=1),
        f"ALTER TABLE {TABLE} DROP CONSTRAINT {{h}}_t_pkey, ADD PRIMARY KEY (k)",
        *writes(dice),
    ]


def inherited(dice: Dice) -> list[str]:
    there, back = "ALTER TABLE {h}_k INHERIT {h}_t", "ALTER TABLE {h}_k NO INHERIT {h}_t"
    return [
        *dice.some([], [back]),
        *writes(dice, "{h}_k"),
        there,
        *writes(dice),
        *dice.some([], [back, *writes(dice, "{h}_k")]),
    ]


def attached(dice: Dice) -> list[str]:
    """Have a captured table be a partition for a time."""
    return [
        f"CREATE TABLE {{h}}_r ({COLUMNS}, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
        "ALTER TABLE {h}_r ATTACH PARTITION {h}_t FOR VALUES FROM (-1) TO (1000)",
        *writes(dice, dice.some("{h}_r", TABLE)),
        *dice.some([], ["ALTER TABLE {h}_r DETACH PARTITION {h}_t", *writes(dice, most=1)]),
    ]


def label_changed(dice: Dice) -> list[str]:
    def use(label: str) -> str:
        value = dice.some(f"m = '{label}'", f"ms = '{{ok,{label}}}'", f"dm = '{label}'")
        return f"UPDATE {TABLE} SET {value} WHERE id % 3 = {dice.randrange(3)}"

    return dice.some(
        ["ALTER TYPE {h}_mood RENAME VALUE 'sad' TO 'blue'", use("blue"),
         "ALTER TYPE {h}_mood RENAME VALUE 'blue' TO 'sad'"],
        ["ALTER TYPE {h}_mood RENAME VALUE 'sad' TO 'low'", use("low")],
        ["ALTER TYPE {h}_mood ADD VALUE 'sleppy'", use("sleppy"),
         "ALTER TYPE {h}_mood RENAME VALUE 'sleppy' TO 'sleepy'"],
        ["ALTER TYPE {h}_mood ADD VALUE 'new' BEFORE 'ok'", use("new")],
        ["ALTER TYPE {h}_mood RENAME TO {h}_temper", use("ok"), use("sad")],
        ["ALTER TYPE {h}_mood SET SCHEMA elsewhere", use("ok"), use("sad")],
        ["ALTER TYPE {h}_mood RENAME VALUE 'sad' TO 'low'",
         "ALTER TYPE {h}_mood ADD VALUE 'sad'", use("sad")],
        ["ALTER TYPE {h}_mood RENAME VALUE 'ok' TO 'swap'",
         "ALTER TYPE {h}_mood RENAME VALUE 'sad' TO 'ok'", use("ok"),
         "ALTER TYPE {h}_mood RENAME VALUE 'swap' TO 'sad'", use("sad")],
    )  # fmt: skip


def attribute_changed(dice: Dice) -> list[str]:
    def use(text: str) -> str:
        return f"UPDATE {TABLE} SET c = '{text}' WHERE id % 3 = {dice.randrange(3)}"

    return dice.some(
        ["ALTER TYPE {h}_pair ADD ATTRIBUTE d int", use("(1,x,4)")],
        ["ALTER TYPE {h}_pair DROP ATTRIBUTE b", use("(2)")],
        ["ALTER TYPE {h}_pair RENAME ATTRIBUTE b TO e", use("(3,y)"),
         "ALTER TYPE {h}_pair RENAME ATTRIBUTE e TO b"],
        ["ALTER TYPE {h}_pair ADD ATTRIBUTE d int", use("(1,x,4)"),
         "ALTER TYPE {h}_pair DROP ATTRIBUTE d", use("(5,z)")],
    )  # fmt: skip


COLUMN_MOVES: tuple[Move, ...] = (
    column_added,
    column_remade,
    column_renamed,
    columns_swapped,
    column_retyped,
    column_generated,
    key_retyped,
)
TABLE_MOVES: tuple[Move, ...] = (
    schema_changed,
    renamed,
    swapped,
    made_again,
    published_again,
    truncated,
    untouched,
    identified,
    attached,
)
KEY_MOVES: tuple[Move, ...] = (key_remade, key_moved)
INHERITANCE_MOVES: tuple[Move, ...] = (inherited, inherited)
TYPE_MOVES: tuple[Move, ...] = (label_changed, label_changed, attribute_changed)

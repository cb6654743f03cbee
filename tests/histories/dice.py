"""Random choices of statements that read and write a history's tables."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")
IDS = 40
"""Keys are 0 to 39; ranges of partitions are ten each."""
LARGE = 2600
"""Characters that go out of line (storage EXTERNAL): not sent again where they do not change."""
TABLE = "{h}_t"
COLUMNS = "id int, note text, n int, big text"
"""Of the tables of all histories."""


class Dice(random.Random):
    """What a history is made up by."""

    def some(self, *of: T) -> T:
        """Choose one."""
        return self.choice(of)

    def chance(self, probability: float) -> bool:
        """Say yes so often."""
        return self.random() < probability

    def id(self) -> int:
        """Choose a key."""
        return self.randrange(IDS)

    def word(self) -> str:
        """Choose a text."""
        return self.some("ash", "birch", "cedar", "oak", "rowan", "yew")

    def some_of(self, of: Sequence[T], most: int) -> list[T]:
        """Choose one to `most`, in any order, one perhaps twice."""
        return [self.choice(of) for _ in range(self.randint(1, most))]


def insert(dice: Dice, table: str = TABLE, low: int = 0, high: int = IDS) -> str:
    """Put rows in for a few keys that are not there."""
    first = dice.randrange(low, high)
    last = min(high - 1, first + dice.randrange(4))
    big = f"repeat('{dice.word()}', {LARGE})" if dice.chance(0.3) else "NULL"
    return (
        f"INSERT INTO {table} (id, note, n, big) SELECT g, '{dice.word()}', g, {big}"
        f" FROM generate_series({first}, {last}) g"
        f" WHERE NOT EXISTS (SELECT FROM {table} x WHERE x.id = g)"
    )


def write(dice: Dice, table: str = TABLE) -> str:
    """Change some rows in some way."""
    i = dice.id()
    rows = dice.some(f"id = {i}", f"id % 5 = {i % 5}", f"id BETWEEN {i} AND {i + 5}", "true")
    return dice.some(
        insert(dice, table),
        insert(dice, table),
        f"UPDATE {table} SET note = '{dice.word()}' WHERE {rows}",
        f"UPDATE {table} SET note = note || '!' WHERE {rows}",
        f"UPDATE {table} SET n = n + 1 WHERE {rows}",
        f"UPDATE {table} SET big = repeat('{dice.word()}', {LARGE}) WHERE id = {i}",
        f"UPDATE {table} SET id = (id + {dice.some(1, 7, 10, 20)}) % {IDS} WHERE id = {i}",
        f"UPDATE {table} SET id = id + 1",
        f"DELETE FROM {table} WHERE {dice.some(f'id = {i}', f'id % 7 = {i % 7}')}",
    )


def writes(dice: Dice, table: str = TABLE, most: int = 2) -> list[str]:
    """Change rows once or a few times."""
    return [write(dice, table) for _ in range(dice.randint(1, most))]


def harmless(dice: Dice, table: str = TABLE) -> str:
    """Alter something of a table that is nothing to its rows."""
    return dice.some(
        f"ANALYZE {table}",
        f"GRANT SELECT ON {table} TO pg_monitor",
        f"VACUUM FULL {table}",
        f"VACUUM ANALYZE {table}",
        f"ALTER TABLE {table} SET (fillfactor = {dice.some(60, 70, 80)})",
        f"ALTER TABLE {table} ALTER note SET STATISTICS {dice.some(100, 200)}",
        f"REINDEX TABLE {table}",
        f"COMMENT ON TABLE {table} IS '{dice.word()}'",
        f"CREATE TRIGGER tr_{dice.randrange(1000)} BEFORE UPDATE ON {table} FOR EACH ROW"
        " EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    )

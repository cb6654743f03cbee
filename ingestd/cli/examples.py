"""Examples of each command, for the end of its help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

EXAMPLES: Mapping[str, Sequence[str]] = {
    "init": (
        "ingestd init",
        "ingestd init shop --dsn env:SHOP_DSN --lake ./lake --yes",
    ),
    "run": ("ingestd run -c ingestd.toml",),
    "check": ("ingestd check -c ingestd.toml",),
    "status": (
        "ingestd status -c ingestd.toml",
        "ingestd status -c ingestd.toml --watch 5",
    ),
    "snapshot": (
        "ingestd snapshot shop public.orders -c ingestd.toml",
        "ingestd snapshot shop public.orders -c ingestd.toml --where 'id < 1000'",
    ),
    "pause": ("ingestd pause shop -c ingestd.toml",),
    "resume": ("ingestd resume shop -c ingestd.toml",),
    "tables": (
        "ingestd tables -c ingestd.toml",
        "ingestd tables shop -c ingestd.toml --schema public --columns",
    ),
    "verify": (
        "ingestd verify shop -c ingestd.toml",
        "ingestd verify shop public.orders -c ingestd.toml --limit-rate 20MB/s",
    ),
    "epochs": ("ingestd epochs shop -c ingestd.toml --limit 5",),
    "peek": (
        "ingestd peek shop public.orders -c ingestd.toml",
        "ingestd peek shop public.orders -c ingestd.toml --limit 1 --json",
    ),
    "export": (
        "ingestd export shop public.orders --format parquet -o orders.parquet",
        "ingestd export shop public.orders -c ingestd.toml --at 17",
    ),
    "query": ("ingestd query shop 'SELECT count(*) FROM orders' -c ingestd.toml",),
    "register": ("ingestd register shop -c ingestd.toml",),
    "drop": ("ingestd drop shop -c ingestd.toml",),
    "demo": ("ingestd demo --seconds 60",),
}


def epilog(command: str) -> str | None:
    """Return a command's examples as the epilog of its help, which is not wrapped."""
    found = EXAMPLES.get(command)
    if found is None:
        return None
    heading = "Example:" if len(found) == 1 else "Examples:"
    return "\n".join(["\b", heading, *(f"  {line}" for line in found)])

"""Prints what ingestd needs to run, with Spark, as installed: name==version."""

# ruff: noqa: INP001

import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOTS = ("ingestd[spark]",)


def needed(roots: tuple[str, ...]) -> dict[str, str]:
    """Give name and version of all that the roots require, but for themselves."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            installed = metadata.distribution(name)
            found[name] = installed.version
            inner = [Requirement(text) for text in installed.requires or ()]
            waiting += [r for r in inner if r.marker is None or r.marker.evaluate({"extra": extra})]
    return {name: v for name, v in found.items() if name != "ingestd"}


if __name__ == "__main__":
    sys.stdout.writelines(f"{n}=={v}\n" for n, v in sorted(needed(ROOTS).items()))

"""`python -m tests.fuzz.guided TARGET [libFuzzer's options]`: one target, guided by coverage.

In a process of its own: atheris instruments what is imported here, and its memory grows by some
hundred bytes an input, so that a run is made of rounds (`tests.fuzz.__main__`).
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["ingestd.decode"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Fuzz."""
    target = TARGETS[sys.argv[1]]

    def run(data: bytes) -> None:
        target(data)

    atheris.Setup([sys.argv[0], *sys.argv[2:]], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

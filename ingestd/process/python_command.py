"""The command and environment of child processes that run this package's Python.

A child process imports nothing from the working directory, where other users may be able to write:
with `-m` and `-c` Python searches it before its own library.
"""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path


def python_command(*words: str) -> list[str]:
    """Return the command of a child process that imports nothing from the working directory.

    Its environment must be `module_environment`.
    """
    return [sys.executable, "-P", *words]


def module_environment() -> dict[str, str]:
    """Return this process's environment, changed so that `python -m` finds this package."""
    parent = str(Path(__file__).parents[2])
    own = [] if parent in {*site.getsitepackages(), site.getusersitepackages()} else [parent]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [*own, *filter(os.path.isabs, inherited)]  # an empty entry is the working directory
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return {**environment, "PYTHONPATH": os.pathsep.join(path)} if path else environment

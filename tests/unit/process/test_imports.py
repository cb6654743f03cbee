"""The daemon does not import pandas."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

ARRAY = "import pyarrow as pa; pa.array([1.5])"
RUN = ("-m", "ingestd", "run", "-c", "missing.toml")


@pytest.mark.parametrize(("words", "has_pandas"), [(("-c", ARRAY), True), (RUN, False)])
def test_pyarrow_imports_pandas_but_not_in_the_daemon(
    words: tuple[str, ...], *, has_pandas: bool
) -> None:
    pytest.importorskip("pandas")
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    imported = set(re.findall(r"\| +(\S+)$", done.stderr, re.MULTILINE))
    assert "pyarrow.lib" in imported
    assert ("pandas.core.api" in imported) is has_pandas

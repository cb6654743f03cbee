"""Every decoder twice: with the compiled part, and as it is where there was no C compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ingestd.decode import native


@pytest.fixture(scope="module", params=["compiled", "numpy"], autouse=True)
def decoding(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "compiled" and native.compiled is None:
        pytest.skip("the compiled part is not there: pip found no C compiler or no Python.h")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(native, "compiled", None)
        yield request.param

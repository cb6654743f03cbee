from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ingestd
from ingestd import failpoints
from ingestd.failpoints import POINTS, arm, lost, os_error, parse, reach, reach_async
from ingestd.model.errors import ConfigError, TransientError
from ingestd.testing.embedded.daemon import module_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

BEFORE, AFTER = "sink.fsync.before", "sink.fsync.after"
PLACES = re.compile(r'reach(?:_async)?\(\s*"([^"]+)"')


class Told:
    """Records what acts."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, int]] = []

    def __call__(self, point: str, action: str, time: int) -> None:
        self.found.append((point, action, time))


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    arm("", Told())


def test_nothing_happens_without_entries() -> None:
    assert not arm("", Told())
    reach(BEFORE)
    assert not failpoints.parse(" , ")


def test_an_error_comes_at_its_time_alone() -> None:
    told = Told()
    assert arm(f"{BEFORE}=error@3", told)
    reach(BEFORE)
    reach(AFTER)
    reach(BEFORE)
    with pytest.raises(OSError, match=BEFORE):
        reach(BEFORE, os_error)
    reach(BEFORE)
    assert told.found == [(BEFORE, "error", 3)]


def test_an_entry_with_a_plus_repeats() -> None:
    arm(f"{BEFORE}=error@2+", Told())
    reach(BEFORE)
    for _ in range(3):
        with pytest.raises(TransientError, match=BEFORE):
            reach(BEFORE, lost)


def test_what_follows_waits_until_all_before_it_has_acted() -> None:
    told = Told()
    arm(f"{BEFORE}=delay:0, {AFTER}=delay:0@2 > {BEFORE}=error", told)
    for point in (BEFORE, BEFORE, AFTER, BEFORE, AFTER):
        reach(point)
    with pytest.raises(OSError, match=BEFORE):
        reach(BEFORE)
    assert told.found == [(BEFORE, "delay", 1), (AFTER, "delay", 2), (BEFORE, "error", 1)]


async def test_a_delay_takes_its_time() -> None:
    arm(f"{BEFORE}=delay:0.05@1+", Told())
    began = time.monotonic()
    reach(BEFORE)
    await reach_async(BEFORE)
    assert time.monotonic() - began >= 0.1


def test_a_process_leaves_the_points_of_others_alone() -> None:
    told = Told()
    assert arm(f"{BEFORE}=error,maintenance.clean.before=error", told, only="maintenance.")
    reach(BEFORE)
    with pytest.raises(TransientError):
        reach("maintenance.clean.before", lost)
    assert not arm(f"{BEFORE}=error", told, only="maintenance.")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sink.fsync.befor=crash", "write 'sink.fsync.before'"),
        ("fsync=crash", "no such point: 'fsync'"),
        (f"{BEFORE}=explode", "is not a valid entry"),
        (f"{BEFORE}", "is not a valid entry"),
        (f"{BEFORE}=crash@x", "is not a valid entry"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        parse(text)


def test_a_crash_is_a_sigkill() -> None:
    program = (
        "from ingestd.failpoints import arm, reach\n"
        "arm('sink.fsync.before=crash', lambda *found: print(*found, flush=True))\n"
        "reach('sink.fsync.before')\nprint('went on')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=module_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "sink.fsync.before crash 1\n"


def test_every_point_is_somewhere_and_no_other() -> None:
    package = Path(ingestd.__file__).parent
    paths = [path for path in package.rglob("*.py") if path.name != "failpoints.py"]
    text = "".join(path.read_text("utf-8") for path in paths)
    assert set(PLACES.findall(text)) <= set(POINTS)
    for point in POINTS:
        step = point.rpartition(".")[0]  # where one function makes both kinds of slot
        assert f'"{point}"' in text or f'"{step}"' in text, f"{point} is nowhere"
    assert os.environ.get(failpoints.VARIABLE) is None, "the tests run with failpoints"

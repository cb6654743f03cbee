"""`make fuzz`: each target for some seconds; what was run, covered and found."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
ROUND_RUNS = 1_000_000
LIMITS = ("-max_len=1500", "-timeout=30", "-rss_limit_mb=2000", "-print_final_stats=1")
"""A message, seconds and MB: an input that takes more is a finding."""
_EXECUTED = re.compile(r"stat::number_of_executed_units: (\d+)")
_COVERED = re.compile(r"#\d+\s+\w+\s+cov: (\d+) ft: (\d+) corp: (\d+)")


@dataclass(slots=True)
class Found:
    """Of one target: `covered` in edges of its code, `features` with their counts."""

    target: str
    executed: int = 0
    seconds: float = 0.0
    covered: int = 0
    features: int = 0
    inputs: int = 0
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        line = (
            f"{self.target}: {self.executed} inputs in {self.seconds:.0f} s, {self.covered} edges,"
            f" {self.features} features, {self.inputs} inputs kept; {len(self.findings)} findings"
        )
        return "\n".join([line, *self.findings])


def main(arguments: list[str]) -> int:
    """Fuzz; 1 if anything was found: then the input is in `--folder`."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--targets", nargs="*", default=sorted(p.name for p in CORPUS.iterdir()))
    chosen = parser.parse_args(arguments)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        found = list(
            pool.map(lambda name: _fuzz(name, chosen.folder, chosen.seconds), chosen.targets)
        )
    _print("\n".join(map(str, found)), f"{sum(one.executed for one in found)} inputs in all")
    return 1 if any(one.findings for one in found) else 0


def _fuzz(target: str, folder: Path, seconds: float) -> Found:
    """Fuzz in rounds; each starts from the inputs that the previous one kept."""
    here = folder / target
    kept = here / "kept"
    kept.mkdir(parents=True, exist_ok=True)
    for path in (CORPUS / target).iterdir():
        shutil.copy(path, kept)
    found = Found(target)
    began = time.monotonic()
    while (left := seconds - (time.monotonic() - began)) >= 1 and not found.findings:
        _round(found, here, int(left))
        found.seconds = time.monotonic() - began
        _print(str(found))
    return found


def _round(found: Found, here: Path, seconds: int) -> None:
    command = [sys.executable, "-m", "tests.fuzz.guided", found.target, str(here / "kept")]
    options = [f"-max_total_time={seconds}", f"-runs={ROUND_RUNS}", f"-artifact_prefix={here}/"]
    done = subprocess.run(
        [*command, *LIMITS, *options], capture_output=True, text=True, errors="replace", check=False
    )
    (here / "log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if executed := _EXECUTED.search(done.stderr):
        found.executed += int(executed[1])
    if covered := _COVERED.findall(done.stderr):
        found.covered, found.features, found.inputs = map(int, covered[-1])
    if done.returncode:
        inputs = [str(path) for path in here.iterdir() if path.name.split("-")[0] in _KINDS]
        found.findings.append(f"see {here / 'log'}: {', '.join(inputs) or 'no input'}")


_KINDS = frozenset({"crash", "timeout", "oom", "leak", "slow"})


def _print(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)  # noqa: T201 - the program's output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m tests.fuzz.native`: the compiled part alone, with the compiler's checks.

`native_driver.c` makes the inputs. Ends with exit code 1 and the report at the first finding.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("native_driver.c")
# Nothing of Python is linked: what calls it is left out, as nothing calls that.
FLAGS = (
    *("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Wno-unused-function"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "--param", "asan-globals=0"),
    *("-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections"),
)


def build(folder: Path) -> Path:
    """Compile the driver with the sanitizers, and return the program."""
    program = folder / "native_driver"
    includes = [f"-I{ROOT / 'ingestd/decode'}", f"-I{sysconfig.get_paths()['include']}"]
    command = ["gcc", *FLAGS, *includes, str(DRIVER), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def run(program: Path, inputs: int, seed: int) -> subprocess.CompletedProcess[str]:
    """Run so many inputs of a seed."""
    command = [str(program), str(inputs), str(seed)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def main() -> int:
    """Build and run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=50_000_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if shutil.which("gcc") is None:
        print("gcc and its sanitizers are needed: apt-get install gcc", file=sys.stderr)  # noqa: T201
        return 1
    with tempfile.TemporaryDirectory() as folder:
        done = run(build(Path(folder)), asked.inputs, asked.seed)
    print(done.stdout + done.stderr, end="")  # noqa: T201
    return min(done.returncode, 1) if done.returncode >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())

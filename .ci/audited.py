"""Says what pip-audit found (its JSON in a file); ends with 1 if there are vulnerabilities."""

# ruff: noqa: INP001

import json
import sys
from pathlib import Path
from typing import Any


def report(found: list[dict[str, Any]]) -> tuple[list[str], int]:
    """Give the lines to print, and the exit code."""
    lines = [
        f"{package['name']} {package['version']}: {fault['id']}, mended in "
        f"{', '.join(fault['fix_versions']) or 'no version yet'}"
        for package in found
        for fault in package.get("vulns", ())
    ]
    faults, code = len(lines), int(bool(lines))
    skipped = [package["name"] for package in found if "skip_reason" in package]
    looked_up = len(found) - len(skipped)
    if not looked_up:
        lines.append("audit: NOT DONE: the package index in use has no list of vulnerabilities")
        return lines, code
    if skipped:
        lines.append(f"audit: not looked up: {', '.join(skipped)}")
    lines.append(f"audit: {looked_up} packages looked up, {faults} faults")
    return lines, code


if __name__ == "__main__":
    told, exit_code = report(json.loads(Path(sys.argv[1]).read_text("utf-8"))["dependencies"])
    sys.stdout.writelines(f"{line}\n" for line in told)
    sys.exit(exit_code)

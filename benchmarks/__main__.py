"""`make bench`: run the core or the named benchmarks, then print and write the figures."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from benchmarks import reach, wider
from benchmarks.daemon import memory
from benchmarks.harness.figure import Figure
from benchmarks.harness.report import RESULTS, line_of, read_lines, report
from benchmarks.harness.rig import Rig, rig
from benchmarks.reach import FULL, QUICK, Size

CORE: dict[str, Callable[[Rig, Size], list[Figure]]] = {
    "decode": reach.decode_figures,
    "snapshot": reach.snapshot_figures,
    "drain": reach.drain_figures,
    "freshness": reach.freshness_figures,
    "idle": reach.idle_figures,
}
QUICK_CORE = ("decode", "snapshot", "drain", "freshness")
WIDER: dict[str, Callable[[Rig, Size], list[Figure]]] = {
    "growth": reach.growth_figures,
    "tables": lambda rig, _: wider.many_tables_figures(rig),
    "changing": lambda rig, _: wider.changing_tables_figures(rig),
    "life": lambda rig, _: wider.life_figures(rig),
    "resume": lambda rig, _: wider.resume_figures(rig),
    "recovery": lambda rig, _: wider.recovery_figures(rig),
    "chunked": lambda rig, _: wider.chunked_figures(rig),
    "datasource": lambda rig, _: wider.datasource_figures(rig),
    "mirror": lambda rig, _: wider.mirror_figures(rig),
    "reading": lambda rig, _: wider.reading_figures(rig),
    "long_life": lambda rig, _: wider.long_life_figures(rig),
    "object_store": lambda rig, _: wider.object_store_figures(rig),
    "reference": lambda rig, _: wider.reference_figures(rig),
    "polling": lambda rig, _: wider.polling_figures(rig),
    "sweep": lambda rig, _: wider.sweep_figures(rig),
    "verify": lambda rig, _: wider.verify_figures(rig),
    "memory": lambda rig, _: memory.measure(rig),
}
STEPS = CORE | WIDER


def main(arguments: list[str]) -> int:
    """Run the core, or the named benchmarks; `--quick`: a small core, `all`: everything.

    Lines of figures that are not measured stay unchanged. Return 1 if a target is missed.
    """
    size = QUICK if "--quick" in arguments else FULL
    chosen = [name for name in arguments if name != "--quick"]
    if chosen == ["all"]:
        chosen = list(STEPS)
    unknown = set(chosen) - set(STEPS)
    if unknown:
        print(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}, all")
        return 2
    kind = "quick: " if size is QUICK else ""
    earlier = read_lines(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    lines: dict[str, str] = {}
    found: list[Figure] = []
    began = time.monotonic()
    with rig() as server:
        for name in chosen or (QUICK_CORE if size is QUICK else CORE):
            when = f"{datetime.now(UTC):%Y-%m-%d %H:%M}, {os.getloadavg()[0]:.1f}"
            print(f"{name} ...", flush=True)
            for figure in STEPS[name](server, size):
                print(f"  {figure.what}: {figure.measured}", flush=True)
                found.append(figure)
                lines[f"{kind}{figure.what}"] = line_of(figure, when, kind)
            is_core = not chosen and size is FULL
            merged = lines | earlier | lines if is_core else earlier | lines
            RESULTS.write_text(report(merged, server.server.major), encoding="utf-8")
    _print(found)
    print(f"{time.monotonic() - began:.0f} s; written to {RESULTS.name}")
    return 0 if size is QUICK or all(figure.is_reached for figure in found) else 1


def _print(figures: list[Figure]) -> None:
    table = Table("what", "measured", "to reach", "reached")
    for figure in figures:
        table.add_row(
            figure.what,
            figure.measured,
            figure.reach,
            "yes" if figure.is_reached else "[red]no[/red]",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

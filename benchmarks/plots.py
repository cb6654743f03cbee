"""Plots of a run, in benchmarks/plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from benchmarks.daemon.drain import Backlog, Run
from benchmarks.daemon.freshness import Freshness
from benchmarks.harness.report import PLOTS
from benchmarks.harness.rig import Rig


def drain(rig: Rig, found: Backlog, prefix: str) -> None:
    """Plot the durable changes over time, and pg_recvlogical's mean: slopes are throughput."""
    with _picture(f"{prefix}drain") as axes:
        for run in found.drained:
            axes.step(*_durable(rig, run), where="post", label=_name(run), linewidth=1.5)
        for name, seconds in (("a unix socket", found.unix_s), ("TCP", found.tcp_s)):
            axes.plot(
                [0, seconds],
                [0, found.changes / 1e6],
                "--",
                color="gray" if name == "TCP" else "black",
                linewidth=1,
                label=f"pg_recvlogical, {name}",
            )
        axes.set(
            title=f"{found.changes / 1e6:g}M changes drained",
            xlabel="seconds since the start of the process",
            ylabel="million changes durable",
        )
        axes.set_ylim(0, 1.05 * found.changes / 1e6)


def _durable(rig: Rig, run: Run) -> tuple[list[float], list[float]]:
    """Return the times from the start at which epochs were durable, and million rows until then."""
    began = rig.meters[run.name].began
    times, rows = [0.0], [0.0]
    for event in rig.daemon_events(run.name, "epoch.committed"):
        at_s = datetime.fromisoformat(event["timestamp"]).timestamp() - began
        if at_s > 0:  # without those of the previous run, which created the slot
            times.append(at_s)
            rows.append(rows[-1] + int(event["rows"]) / 1e6)
    return times, rows


def _name(run: Run) -> str:
    way = "streaming only" if run.streaming else "by SQL functions"
    return f"ingestd, {way}, {'a unix socket' if run.socket else 'TCP'}"


def memory(rig: Rig, prefix: str) -> None:
    """Plot the resident memory of the daemons measured so far, one of each kind."""
    with _picture(f"{prefix}memory") as axes:
        for name, meter in rig.meters.items():
            if name.endswith("_") or name[-1].isdigit():
                continue  # another round of the same kind
            axes.plot(meter.at_s, np.array(meter.resident_bytes) / 1e6, label=name, linewidth=1)
        axes.set(title="Resident memory", xlabel="seconds", ylabel="MB")
        axes.set_ylim(bottom=0)


def freshness(found: Mapping[str, Freshness], prefix: str) -> None:
    """Plot the age of transactions at the time they were durable."""
    with _picture(f"{prefix}freshness") as axes:
        for number, (max_delay, one) in enumerate(found.items()):
            ages_ms = one.ages_s * 1e3
            color = f"C{number}"
            bins = np.arange(0, np.quantile(ages_ms, 0.9999) + 20, 10).tolist()
            axes.hist(
                ages_ms, bins=bins, histtype="step", color=color, label=f"max_delay {max_delay}"
            )
            for q in (0.5, 0.99):
                at_ms = one.quantile_s(q) * 1e3
                axes.axvline(at_ms, color=color, linestyle=":", linewidth=1)
                axes.text(at_ms, axes.get_ylim()[1], f"p{q * 100:g}", color=color, ha="center")
        axes.set(
            xlabel="ms from the commit at the source to durable in the lake", ylabel="transactions"
        )


@contextmanager
def _picture(name: str) -> Iterator[Axes]:
    """Yield axes to draw on, and write them to `name`.png."""
    with mpl.rc_context({"font.size": 8}):
        picture = Picture(figsize=(7, 3.2), layout="constrained")
        axes = picture.subplots()
        yield axes
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        PLOTS.mkdir(exist_ok=True)
        picture.savefig(PLOTS / f"{name}.png", dpi=90)

"""docs/reference/metrics.md: every metric, from a registry like the daemon's."""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING

import numpy as np

from docs_site.markdown import MADE_BY, table
from ingestd.observe import metrics
from ingestd.observe.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

_INTRO = """# Metrics

`/metrics` on `http.listen` has them in Prometheus' text format. Bytes and seconds; LSNs as numbers;
`NaN` if a value is unknown. Counters end in `_total`; a histogram has `_bucket`, `_sum` and `_count`.
A series appears with its first value.
"""
_MORE = {
    "ingestd_lag_bytes": "Grows while the lake is behind, or while the source is not delivering.",
    "ingestd_slot_retained_bytes": "Disk space that the slot takes at the source.",
    "ingestd_slot_safe_bytes": (
        "Before `max_slot_wal_keep_size` invalidates the slot; NaN without that setting."
    ),
    "ingestd_freshness_seconds": "For each transaction, by the clocks of both machines.",
    "ingestd_rows": "`op` is `r`, `c`, `u`, `d` or `t`.",
    "ingestd_restarts": "`reason` is a constant word, as in the errors' reference.",
    "ingestd_table_state": "`snapshotting`, `live`, `stopped`, `dropped` (for a day).",
    "ingestd_buffer_bytes": "Bounded by `limits.memory`.",
    "ingestd_raw_values": "Nothing is lost: [types](../types.md) says which values these are.",
    "ingestd_ignored_messages": (
        "With [`ddl_log`](../ddl.md); such messages are ignored, whatever they contain."
    ),
    "ingestd_snapshot_progress_ratio": "0 to 1, by the server's estimate; removed when it is read.",
}
_PROCESS = """
## Process metrics

From prometheus-client: `process_resident_memory_bytes`, `process_virtual_memory_bytes`,
`process_cpu_seconds_total`, `process_open_fds`, `process_max_fds`, `process_start_time_seconds`,
`python_info`.
"""


def page() -> str:
    """Return the page."""
    rows = [
        (f"`{name}`", kind, ", ".join(labels), f"{what} {_MORE.get(base, '')}")
        for name, base, kind, labels, what in sorted(_all())
    ]
    body = table(("metric", "kind", "labels", "meaning"), rows)
    return f"{MADE_BY}{_INTRO}\n{body}{_PROCESS}"


def _all() -> Iterator[tuple[str, str, str, tuple[str, ...], str]]:
    labels = dict(_labels())
    made = Metrics()
    made.committed("-", transactions=1, commit_seconds=0.0, ages_s=np.zeros(1))
    for family in made.registry.collect():
        if family.name.startswith("ingestd_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            of = labels.get(family.name, ("source",))
            yield name, family.name, family.type, of, family.documentation


def _labels() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the labels of each metric; before its first value the client does not report them."""
    for call in ast.walk(ast.parse(inspect.getsource(metrics))):
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in {"_gauge", "_counter"}
        ):
            name, _, *more = (ast.literal_eval(argument) for argument in call.args)
            yield f"ingestd_{name}", ("source", *more)

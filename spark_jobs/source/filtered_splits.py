"""Refuses queries in which Spark 4.2 would mix up the filters of a Python data source.

Spark stores the partitions of the last plan in the loaded DataFrame
(PythonDataSourceV2.setReadInfo), not in the scan. Another scan of that DataFrame, without filters
or planned at the same time with other filters, reads those partitions and misses rows. Python is
not notified of the other scan. This module refuses what it can detect.
"""

from __future__ import annotations

from collections import OrderedDict

from ingestd.model.errors import OperatorError
from spark_jobs.source.read_plan import ReadPlan

KNOWN = 10_000
_REMEDY = "load() the table again for each filter, or omit the option pushdown"


class FilteredLoads:
    """The filters that a `load()` was planned with, and the executions of plans with filters."""

    def __init__(self) -> None:
        self._filters: OrderedDict[str, str] = OrderedDict()
        self._executions: OrderedDict[str, str] = OrderedDict()

    def planned(self, plan: ReadPlan) -> None:
        """Record a plan. Raises OperatorError if its `load()` was planned with other filters."""
        if not plan.filters:
            return
        if _first(self._filters, plan.load, plan.filters) != plan.filters:
            raise OperatorError(
                f"table {plan.source.table.id}: this DataFrame was planned with other filters "
                "before, and Spark would confuse the two",
                remedy=_REMEDY,
            )

    def executed(self, plan_id: str, plan: ReadPlan, execution: str) -> None:
        """Record an execution. Raises OperatorError if the plan was for another one."""
        if plan.filters and _first(self._executions, plan_id, execution) != execution:
            raise OperatorError(
                f"table {plan.source.table.id}: another query reads a plan made for a filter",
                remedy=_REMEDY,
            )


def _first(known: OrderedDict[str, str], name: str, value: str) -> str:
    """Return the value known by this name; if there is none, store this one."""
    found = known.setdefault(name, value)
    while len(known) > KNOWN:
        known.popitem(last=False)
    return found

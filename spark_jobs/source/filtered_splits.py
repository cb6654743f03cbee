"""Refuses what Spark 4.2 would mix up of filters that it hands to a Python data source.

Spark keeps the partitions of the plan that was made last with the loaded DataFrame
(PythonDataSourceV2.setReadInfo), not with the scan. Another scan of that DataFrame, without filters
or planned at the same time with others, reads those partitions, and misses rows. Python is not told
of the other scan. What can be seen of it here is refused.
"""

from __future__ import annotations

from collections import OrderedDict

from ingestd.model.errors import OperatorError
from spark_jobs.source.read_plan import ReadPlan

KNOWN = 10_000
_REMEDY = "load() the table anew for each filter, or leave the option pushdown out"


class FilteredLoads:
    """Which filters a `load()` was planned with, and where a plan with filters was executed."""

    def __init__(self) -> None:
        self._filters: OrderedDict[str, str] = OrderedDict()
        self._executions: OrderedDict[str, str] = OrderedDict()

    def planned(self, plan: ReadPlan) -> None:
        """Take a plan. Raises OperatorError if its `load()` was planned with other filters."""
        if not plan.filters:
            return
        if _first(self._filters, plan.load, plan.filters) != plan.filters:
            raise OperatorError(
                f"table {plan.source.table.id}: this DataFrame was planned with other filters "
                "before, and Spark would take the one for the other",
                remedy=_REMEDY,
            )

    def executed(self, plan_id: str, plan: ReadPlan, execution: str) -> None:
        """Take an execution. Raises OperatorError if the plan was for another one."""
        if plan.filters and _first(self._executions, plan_id, execution) != execution:
            raise OperatorError(
                f"table {plan.source.table.id}: another query reads what was planned for a filter",
                remedy=_REMEDY,
            )


def _first(known: OrderedDict[str, str], name: str, value: str) -> str:
    """Return what was known by this name, else let it be the value."""
    found = known.setdefault(name, value)
    while len(known) > KNOWN:
        known.popitem(last=False)
    return found

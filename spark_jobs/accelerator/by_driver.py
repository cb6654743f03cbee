"""The accelerator by Delta's own classes, and the check of whether a session has them.

Delta has no public calls for what it does, so a version of Delta or a managed cluster may lack
them, or refuse them. What shows this turns the accelerator off for the run (`switch.py`), and Spark
does the work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from spark_jobs.accelerator.class_tables import ClassTables
from spark_jobs.accelerator.driver_commit import AppTransaction, streaming_update
from spark_jobs.accelerator.driver_files import packed_vector, vector_store
from spark_jobs.accelerator.driver_merge import DriverMerge
from spark_jobs.accelerator.file_cache import MirrorFiles
from spark_jobs.accelerator.newest_files import MOST_ENTRIES, NewestFiles
from spark_jobs.accelerator.row_files import RowFiles
from spark_jobs.accelerator.switch import Switch
from spark_jobs.delta_log.acceleration import SparkAlone

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pyspark.sql import SparkSession

    from spark_jobs.delta_log.acceleration import MergeLimits, NewestRows, OutcomeMerge, RowWriter
    from spark_jobs.delta_log.tables import DeltaTables


def tried_out(session: SparkSession) -> DriverAccelerator:
    """Return the accelerator of a session's jobs, off if the session's Delta lacks a class."""
    found = DriverAccelerator()
    try:
        _try_out(session)
    except (Py4JError, PySparkException) as error:
        found.switch.stays_on(session, error)
    return found


def _try_out(session: SparkSession) -> None:
    """Use the classes as the accelerator does, except for those that need a table."""
    streaming_update(session, AppTransaction("probe", 1, "Update"), None)
    packed_vector(session, np.array([1, 5]))
    vector_store(session)


@dataclass(frozen=True, slots=True)
class DriverAccelerator:
    """Implements `spark_jobs.delta_log.acceleration.Accelerator`.

    `most_entries`: see `NewestFiles`. `merge_type`, `row_type`: the classes that change a mirror
    and that add rows.
    """

    most_entries: int = MOST_ENTRIES
    files: MirrorFiles = field(default_factory=MirrorFiles)
    merge_type: type[DriverMerge] = DriverMerge
    row_type: type[RowFiles] = RowFiles
    switch: Switch = field(default_factory=Switch)
    tables: DeltaTables = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", ClassTables(self.switch))

    def newest(self, session: SparkSession, path: str) -> NewestRows:
        """See `Accelerator`."""
        if self.switch.is_off:
            return SparkAlone().newest(session, path)
        return NewestFiles(session, path, self.most_entries, self.switch)

    def row_writer(self, session: SparkSession, path: str, app_id: str) -> RowWriter:
        """See `Accelerator`."""
        if self.switch.is_off:
            return SparkAlone().row_writer(session, path, app_id)
        return self.row_type(session, path, app_id, self.switch)

    def merge(
        self, session: SparkSession, path: str, app_id: str, above: int, limits: MergeLimits
    ) -> OutcomeMerge | None:
        """See `Accelerator`."""
        if self.switch.is_off:
            return None
        return self.merge_type(session, path, app_id, above, self.files, limits, self.switch)

    def room_for(self, nbytes: int) -> AbstractContextManager[None]:
        """See `Accelerator`."""
        return self.files.room_for(nbytes)

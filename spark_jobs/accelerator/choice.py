"""Whether a session's jobs have the accelerator. Imports py4j only where they do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ingestd.model.errors import ConfigError
from spark_jobs.delta_log.acceleration import Accelerator, SparkAlone
from spark_jobs.delta_log.tables import has_known_classes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VARIABLE = "INGESTD_SPARK_ACCELERATOR"
"""Environment variable: `off` has the effect of --no-accelerator."""


def accelerator_of(session: SparkSession, *, is_wanted: bool = True) -> Accelerator:
    """Return the accelerator of a session's jobs: `SparkAlone` if not wanted or not possible.

    Raises ConfigError for another value of the environment variable than `on` and `off`.
    """
    chosen = os.environ.get(VARIABLE, "on")
    if chosen not in {"on", "off"}:
        raise ConfigError(f"{VARIABLE}: {chosen!r} is neither on nor off", remedy=f"{VARIABLE}=off")
    if not is_wanted or chosen == "off" or not has_known_classes(session):
        return SparkAlone()
    from spark_jobs.accelerator.by_driver import tried_out  # noqa: PLC0415 - imports py4j

    return tried_out(session)

"""The errors that calls of Spark raise."""

from __future__ import annotations

from pyspark.errors import PySparkException

SPARK_ERRORS: tuple[type[Exception], ...] = (PySparkException,)
try:
    from py4j.protocol import Py4JError
except ImportError:  # a client of Spark Connect alone has none
    pass
else:
    SPARK_ERRORS = (*SPARK_ERRORS, Py4JError)

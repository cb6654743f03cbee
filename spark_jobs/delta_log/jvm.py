"""Classes of Spark's JVM, by their whole names.

By `session._jvm` each part of a name is asked for, and the JVM looks for a class `org`, one
`org.apache` and so on through all of Spark's jars: some milliseconds for each class, each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from py4j.java_gateway import JavaClass

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_SQL = "org.apache.spark.sql"
DELTA = f"{SPARK_SQL}.delta"
HADOOP_PATH = "org.apache.hadoop.fs.Path"


def java_class(session: SparkSession, name: str) -> Any:  # noqa: ANN401 - whatever it has
    """Return a class: its static members, and by a call its constructor.

    Whether it is there shows when it is used (Py4JError). Raises PySparkException on a Spark
    Connect server.
    """
    return JavaClass(name, session._jvm._gateway_client)  # type: ignore[union-attr]  # noqa: SLF001


def option(session: SparkSession, value: Any = None) -> Any:  # noqa: ANN401 - whatever it has
    """Return Scala's Some of a value, or None."""
    return java_class(session, "scala.Option").apply(value)

"""Classes of Spark's JVM, by their full names.

`session._jvm` resolves a name part by part: the JVM searches all of Spark's jars for a class `org`,
then for `org.apache`, and so on. That takes a few milliseconds for each class, every time.
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
    """Return a class: its attributes are static members, and a call is its constructor.

    A missing class raises Py4JError only when it is used. Raises PySparkException on a Spark
    Connect server.
    """
    return JavaClass(name, session._jvm._gateway_client)  # type: ignore[union-attr]  # noqa: SLF001


def option(session: SparkSession, value: Any = None) -> Any:  # noqa: ANN401 - whatever it has
    """Return Scala's Some of a value, or None."""
    return java_class(session, "scala.Option").apply(value)

"""Where Hadoop finds the files of a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_jobs.accelerator.jvm import HADOOP_PATH, java_class

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def local_folder(session: SparkSession, path: str) -> Path | None:
    """Return the local folder of a table; None if it is in an object store."""
    folder, system = place_of(session, path)
    return Path(folder.toUri().getPath()) if is_local(system) else None


def is_local(system: Any) -> bool:  # noqa: ANN401 - Java's
    """Return whether a file system of Hadoop is that of the local disks."""
    return str(system.getUri().getScheme()) == "file"


def place_of(session: SparkSession, folder: str, name: str | None = None) -> tuple[Any, Any]:
    """Return a folder, or a file in it, as Hadoop's path, and its file system."""
    hadoop_path = java_class(session, HADOOP_PATH)  # pyspark has no call for files
    path = hadoop_path(folder) if name is None else hadoop_path(hadoop_path(folder), name)
    configuration = session._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    return path, path.getFileSystem(configuration)

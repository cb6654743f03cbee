"""``spark``: one session for all tests; without Java or pyspark they fail and say what to install.

(The first Delta read of a JVM costs ten seconds and more.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.errors import OperatorError
from spark_jobs.class_archive import options_to_use
from spark_jobs.session import JAVA_OPTIONS, LOCAL_SETTINGS, class_archive, local_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


FEW_ROWS = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""Plans for few rows are not worth being compiled; jobs in processes of their own compile them."""


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    settings = {
        **FEW_ROWS,
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        JAVA_OPTIONS: _java_options(),
    }
    try:
        session = local_session("ingestd tests", settings=settings)
    except OperatorError as error:
        pytest.fail(f"the tests in tests/spark need Spark: {error}")
    yield session
    session.stop()


def _java_options() -> str:
    """What a local session has, and no second compiler: few rows do not pay for its work."""
    archive = class_archive()
    kept = "" if archive is None else options_to_use(archive)
    return f"{LOCAL_SETTINGS[JAVA_OPTIONS]} -XX:TieredStopAtLevel=1{kept}"

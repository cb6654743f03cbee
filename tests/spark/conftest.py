"""``spark``: one session for all tests; without Java or pyspark they fail and say what to install.

(The first Delta read of a JVM costs ten seconds and more.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.model.errors import OperatorError
from spark_jobs.session import local_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


FEW_ROWS = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}
"""Plans for few rows are not worth being compiled, or looked at again after each stage; jobs in
processes of their own do both."""


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    settings = {
        **FEW_ROWS,
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        # of the server that `test_connect.py` starts
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
    }
    try:
        session = local_session("ingestd tests", settings=settings)
    except OperatorError as error:
        pytest.fail(f"the tests in tests/spark need Spark: {error}")
    yield session
    session.stop()

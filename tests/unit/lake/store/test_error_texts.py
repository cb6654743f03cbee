"""A text in one table's folder does not decide whose its fault is."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

import pytest
from deltalake.exceptions import DeltaError

from ingestd.lake.delta.log import TableLog
from ingestd.lake.store.errors import storage_fault
from ingestd.lake.store.store import open_store
from ingestd.model.errors import FolderError
from tests.harness.hostile_folder import make_table, quoting_commits

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.attack("lake writer")

TEXTS = (
    *("(os error 28)", "(os error 5)", "(os error 24)", "request timed out", "HTTP 503 S"),
    *("ExpiredToken", "Generic S3 error: Error performing GET s3://x timed out (os error 28)"),
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("place", quoting_commits(""))
def test_a_folders_fault_stays_its_own(tmp_path: Path, text: str, place: str) -> None:
    make_table(tmp_path / "shop/public/bad", quoting_commits(text)[place])
    table = TableLog(open_store(str(tmp_path), None), "shop/public/bad", "x")
    with contextlib.suppress(FolderError):  # any other IngestdError stops the source
        table.load()
        table.app_version()


@pytest.mark.parametrize("text", TEXTS)
def test_a_files_name_is_no_errno(text: str) -> None:
    path = f"lake/shop/public/bad/part-1{text}.parquet"
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", path)
    assert isinstance(storage_fault(error, "lake/shop/public/bad"), FolderError)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "quotes",
    [
        OSError("Couldn't deserialize thrift: {}"),
        OSError("Object at location a/{} not found: Error performing HEAD http://a/b: 404 Not F"),
        OSError("The operation lacked the necessary privileges to complete for path a/{}: 403"),
        OSError("Object at location a/{} not found: No such file or directory (os error 2)"),
        DeltaError("Generic DeltaTable error: {}"),
        DeltaError("Kernel error: Generic delta kernel error: {}"),
        DeltaError("Invalid table: {}"),
    ],
)
def test_a_quoted_text_decides_nothing(quotes: Exception, text: str) -> None:
    fault = storage_fault(type(quotes)(str(quotes).format(text)), "lake/shop/public/bad")
    assert isinstance(fault, FolderError), fault

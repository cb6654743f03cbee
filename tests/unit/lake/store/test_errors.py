"""What storage errors mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from ingestd.lake.store.errors import storage_fault, storage_faults
from ingestd.model.errors import FolderError, IngestdError, OperatorError, TransientError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (OSError(28, "No space left on device"), OperatorError, "disk is full"),
        (PermissionError(13, "Permission denied"), FolderError, "permission denied"),
        (
            OSError("Generic LocalFileSystem error: Unable to x: Read-only (os error 30)"),
            OperatorError,
            "read-only",
        ),
        (
            OSError(
                "Kernel error -> Generic LocalFileSystem error\n \x1b[31m↳\x1b[0m Unable to walk"
                " dir\n ↳ File system loop found\n ↳ /l/t/_delta_log/z: x (os error 28)/l points"
                " to an ancestor /l/t/_delta_log/z: No space left on device (os error 28)"
            ),
            FolderError,
            "loop found",
        ),
        (
            OSError(
                "Generic LocalFileSystem error: Unable to walk dir: IO error for operation on"
                " /l/zz (os error 28): Read-only file system (os error 30)"
            ),
            OperatorError,
            "read-only",
        ),
        (
            OSError("Generic LocalFileSystem error: Filenames containing x: /l/y (os error 28)"),
            FolderError,
            "Filenames",
        ),
        (
            OSError("Generic LocalFileSystem error: not known so far: HTTP 503"),
            FolderError,
            "so far",
        ),
        (OSError("Generic S3 error: \x1b]0;title\x07 timed out"), TransientError, "]0;title"),
        (OSError("HTTP status 503 Slow Down"), TransientError, "503"),
        (OSError("operation timed out"), TransientError, "timed out"),
        (OSError("tcp connect error Connection refused (os error 111)"), TransientError, "refused"),
        (
            OSError(
                "Error performing GET http://a/b?c in 7ms - Server returned non-2xx status code 404"
                " Not Found <Error><Code>NoSuchBucket</Code>\n<Message>No bucket b</Message>"
            ),
            OperatorError,
            "lake /lake/x: NoSuchBucket: No bucket b",
        ),
        (
            OSError("after 10 retries - 503 <Error><Code>SlowDown</Code></Error>"),
            TransientError,
            "SlowDown",
        ),
        (
            OSError(
                "Error performing POST http://a/b - Server returned non-2xx status code: 404 Not"
                " Found: <Error><Code>NoSuchUpload</Code></Error>"
            ),
            TransientError,
            "NoSuchUpload",
        ),
        (
            OSError("409 Conflict: <Error><Code>ConditionalRequestConflict</Code></Error>"),
            TransientError,
            "ConditionalRequestConflict",
        ),
        (
            OSError(
                "Generic S3 error: Error getting list response body: error reading a body from"
                " connection: end of file before message length reached"
            ),
            TransientError,
            "list response body",
        ),
        (OSError("Generic S3 error: not known so far"), OperatorError, "so far"),
        (OSError("checksum of footer is wrong"), FolderError, "footer"),
        (OSError(36, "File name too long"), FolderError, "too long"),
        (
            OSError("Generic error\n  \x1b[31m↳\x1b[0m bad magic\n"),
            FolderError,
            "error bad magic",
        ),
        (OSError(""), FolderError, "OSError"),
    ],
)
def test_storage_fault(error: OSError, kind: type[Exception], says: str) -> None:
    fault = storage_fault(error, "/lake/x")
    assert isinstance(fault, IngestdError)
    assert fault.what.isprintable()
    assert type(fault) is kind
    assert "/lake/x" in str(fault)
    assert says in str(fault)


@pytest.mark.parametrize("how", ["empty", "cut short", "without an end", "overwritten"])
def test_a_data_file_that_is_damaged_is_named(tmp_path: Path, how: str) -> None:
    path = tmp_path / "part.parquet"
    pq.write_table(pa.table({"a": list(range(1000))}), path)
    whole = path.read_bytes()
    damaged = {
        "empty": b"",
        "cut short": whole[: len(whole) // 2],
        "without an end": whole[:6],
        "overwritten": whole[:4] + b"\xaa" * 100 + whole[104:],
    }
    path.write_bytes(damaged[how])
    with pytest.raises(OperatorError) as caught, storage_faults(str(path)):
        pq.ParquetFile(path).read()
    assert f"lake {path}: a data file is damaged: " in caught.value.what
    assert "from a copy" in str(caught.value.remedy)


def test_what_we_asked_for_in_vain_is_no_damage() -> None:
    with pytest.raises(pa.ArrowInvalid), storage_faults("here"):
        pa.array(["x"]).cast(pa.int64())


@pytest.mark.attack("lake writer", "reader")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"size":', '"size":"Kanarienvogel","other":'),
        ('"size":', '"size":{"Kanarienvogel":1},"other":'),
        ('"modificationTime":', '"modificationTime":["Kanarienvogel"],"other":'),
        ('"dataChange":true', '"dataChange":"Kanarienvogel"'),
        ('"dataChange":true', '"dataChange":Kanarienvogel'),
        ('"partitionValues":{}', '"partitionValues":"Kanarienvogel"'),
        ('{"add"', 'Kanarienvogel\n{"add"'),
    ],
)
def test_row_values_quoted_from_a_log_are_not_reported(
    tmp_path: Path, before: str, after: str
) -> None:
    """Statistics have values, and deltalake quotes what it can't parse."""
    for note in ("a", "b"):
        write_deltalake(tmp_path, pa.table({"note": [note]}), mode="append")
    commit = tmp_path / "_delta_log" / f"{1:020}.json"
    assert before in commit.read_text()
    commit.write_text(commit.read_text().replace(before, after))
    with pytest.raises(DeltaError) as caught:
        DeltaTable(tmp_path).get_add_actions(flatten=True)
    told = str(storage_fault(caught.value, "/lake/x"))
    assert "anari" not in told
    assert "7316492" not in told
    assert "error" in told


@pytest.mark.parametrize(
    "text",
    [
        "Json error: whilst decoding field 'n': failed to parse \"{}\" as Int64",
        "Kernel error: Json error: expected object got {}",
        "Arrow error: Cast error: Cannot cast string '{}' to value of Int64 type",
        "Parser error: Error parsing timestamp from '{}': invalid digit",
        "Invalid argument error: {} is too large to store in a Decimal128 of precision 5",
        "Arithmetic overflow: Overflow happened on: {} * 10",
        "Invalid JSON in log record, version=3, line=`{}`, err=`EOF`",
        'Invalid JSON in file stats: invalid type: string "{}", expected i64 at line 1 column 4',
        "unknown variant `{}`, expected `add`",
        'Data does not satisfy the schema or constraints: ["{}"]',
    ],
)
def test_quotes_of_libraries_are_not_reported(text: str) -> None:
    told = str(storage_fault(DeltaError(text.format("Kanarienvogel")), "/lake/x"))
    assert "anari" not in told
    assert text.partition(" ")[0] in told

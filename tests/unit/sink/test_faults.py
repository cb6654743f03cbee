"""What storage errors mean."""

from __future__ import annotations

import pytest

from ingestd.errors import OperatorError, TransientError
from ingestd.sink.faults import storage_fault


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (OSError(28, "No space left on device"), OperatorError, "disk is full"),
        (PermissionError(13, "Permission denied"), OperatorError, "permission denied"),
        (OSError("Generic error: Read-only file system (os error 30)"), OperatorError, "read-only"),
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
        (OSError("checksum of footer is wrong"), OperatorError, "footer"),
        (
            OSError("Generic error\n  \x1b[31m↳\x1b[0m bad magic\n"),
            OperatorError,
            "error bad magic",
        ),
        (OSError(""), OperatorError, "OSError"),
    ],
)
def test_storage_fault(error: OSError, kind: type[Exception], says: str) -> None:
    fault = storage_fault(error, "/lake/x")
    assert type(fault) is kind
    assert "/lake/x" in str(fault)
    assert says in str(fault)

"""Where obstore puts new objects: in S3 stores that deltalake is sure to reach alike."""

from __future__ import annotations

import pytest

from ingestd.sink.s3_objects import s3_objects

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
GIVEN = {**KEYS, "AWS_REGION": "eu-west-1"}
URI = "s3://bucket/some/prefix"


@pytest.mark.parametrize("uri", [URI, "s3a://bucket/some/prefix/", "s3://bucket"])
@pytest.mark.parametrize(
    "options",
    [
        GIVEN,
        {key.lower(): value for key, value in GIVEN.items()},
        {key.lower().removeprefix("aws_"): value for key, value in GIVEN.items()},
        {**KEYS, "AWS_DEFAULT_REGION": "eu-west-1"},
        {**GIVEN, "AWS_SESSION_TOKEN": "c"},
        {**GIVEN, "aws_token": "c", "AWS_ENDPOINT": "https://minio.example:9000"},
        {**GIVEN, "AWS_ENDPOINT_URL": "http://127.0.0.1:9000", "AWS_ALLOW_HTTP": "TRUE"},
        {**GIVEN, "AWS_CONDITIONAL_PUT": "etag", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"},
        {**GIVEN, "aws_server_side_encryption": "aws:kms", "aws_sse_kms_key_id": "key"},
    ],
)
def test_given_keys_are_enough(uri: str, options: dict[str, str]) -> None:
    assert s3_objects(uri, options, {}) is not None


def test_they_may_be_in_the_environment() -> None:
    assert s3_objects(URI, {}, {**GIVEN, "AWS_PROFILE": "other", "PATH": "/bin"}) is not None
    assert s3_objects(URI, {"region": "eu-west-1"}, KEYS) is not None


@pytest.mark.parametrize(
    ("uri", "options", "environment"),
    [
        ("gs://bucket/some/prefix", GIVEN, {}),
        ("abfss://container@account.dfs.example/lake", GIVEN, {}),
        ("s3://bucket/some prefix", GIVEN, {}),
        ("s3://bucket/some%20prefix", GIVEN, {}),
        (URI, {}, {}),
        (URI, KEYS, {}),  # deltalake looks for the region in other places, too
        (URI, {"AWS_REGION": "eu-west-1", "AWS_PROFILE": "other"}, {}),
        (URI, {**GIVEN, "AWS_IAM_ROLE_ARN": "arn:aws:iam::1:role/other"}, {}),
        (URI, GIVEN, {"AWS_S3_ASSUME_ROLE_ARN": "arn:aws:iam::1:role/other"}),
        (URI, GIVEN, {"AWS_ENDPOINT_URL_S3": "https://other.example"}),
        (URI, {**GIVEN, "AWS_S3_LOCKING_PROVIDER": "dynamodb"}, {}),
        (URI, {**GIVEN, "AWS_CONDITIONAL_PUT": "dynamo:locks"}, {}),
        (URI, {**GIVEN, "timeout": "5s"}, {}),
        (URI, {**GIVEN, "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "maybe"}, {}),
    ],
)
def test_whatever_else_goes_through_deltalake(
    uri: str, options: dict[str, str], environment: dict[str, str]
) -> None:
    assert s3_objects(uri, options, environment) is None

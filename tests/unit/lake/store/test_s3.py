"""Where obstore puts new objects: in S3 stores that deltalake is sure to reach alike."""

from __future__ import annotations

import pytest

from ingestd.lake.store.s3 import NotSureError, s3_objects

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
        {**GIVEN, "AWS_DEFAULT_REGION": "eu-west-1"},
        {**GIVEN, "AWS_SESSION_TOKEN": "c"},
        {**GIVEN, "aws_token": "c", "AWS_ENDPOINT": "https://minio.example:9000"},
        {**GIVEN, "AWS_ENDPOINT_URL": "http://127.0.0.1:9000", "AWS_ALLOW_HTTP": "TRUE"},
        {**GIVEN, "AWS_CONDITIONAL_PUT": "etag", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"},
        {**GIVEN, "aws_server_side_encryption": "aws:kms", "aws_sse_kms_key_id": "key"},
        {**GIVEN, "timeout": "5s", "connect_timeout": "1s"},
        {**GIVEN, "max_retries": "3", "retry_timeout": "1m"},
    ],
)
def test_given_keys_are_enough(uri: str, options: dict[str, str]) -> None:
    s3_objects(uri, options, {})


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ({}, {**GIVEN, "AWS_PROFILE": "other", "PATH": "/bin", "https_proxy": "http://proxy"}),
        ({"region": "eu-west-1"}, KEYS),
        ({**GIVEN, "AWS_ENDPOINT_URL": "https://one.example"}, {"AWS_ENDPOINT_URL": "https://two"}),
    ],
)
def test_they_may_be_in_the_environment(
    options: dict[str, str], environment: dict[str, str]
) -> None:
    s3_objects(URI, options, environment)


@pytest.mark.parametrize(
    ("uri", "options", "environment", "why"),
    [
        ("gs://bucket/some/prefix", GIVEN, {}, "not S3"),
        ("abfss://container@account.dfs.example/lake", GIVEN, {}, "not S3"),
        ("s3://bucket/some prefix", GIVEN, {}, "characters"),
        ("s3://bucket/some%20prefix", GIVEN, {}, "characters"),
        ("s3://bucket/a//b", GIVEN, {}, "characters"),
        ("s3://bucket//b", GIVEN, {}, "characters"),
        ("s3://bucket/a#b", GIVEN, {}, "characters"),
        ("s3://bucket/a/../b", GIVEN, {}, "characters"),
        ("s3://bucket/a?versionId=1", GIVEN, {}, "characters"),
        ("s3://user:secret@bucket/a", GIVEN, {}, "characters"),
        ("s3://bucket:9000/a", GIVEN, {}, "characters"),
        (URI, {}, {}, "AWS_ACCESS_KEY_ID is not set"),
        (URI, KEYS, {}, "AWS_REGION is not set"),
        (URI, {**GIVEN, "AWS_REGION": ""}, {}, "AWS_REGION is empty"),
        (URI, {**GIVEN, "AWS_SESSION_TOKEN": "a\nb"}, {}, "unusual"),
        (URI, {**GIVEN, "AWS_ENDPOINT_URL": "nonsense"}, {}, "not a plain URL"),
        (URI, {**GIVEN, "AWS_ENDPOINT_URL": "http://user:secret@host"}, {}, "not a plain URL"),
        (URI, GIVEN, {"AWS_SESSION_TOKEN": ""}, "AWS_SESSION_TOKEN is empty"),
        (URI, {"AWS_REGION": "eu-west-1", "AWS_PROFILE": "other"}, {}, "AWS_PROFILE"),
        (URI, {**GIVEN, "AWS_IAM_ROLE_ARN": "arn:aws:iam::1:role/other"}, {}, "AWS_IAM_ROLE_ARN"),
        (URI, GIVEN, {"AWS_S3_ASSUME_ROLE_ARN": "arn:a"}, "AWS_S3_ASSUME_ROLE_ARN is set"),
        (URI, GIVEN, {"AWS_ENDPOINT_URL_S3": "https://a.example"}, "AWS_ENDPOINT_URL_S3 is set"),
        (URI, GIVEN, {"AWS_SKIP_SIGNATURE": "true"}, "AWS_SKIP_SIGNATURE is set"),
        (URI, GIVEN, {"ENDPOINT": "https://other.example"}, "ENDPOINT is set"),
        (URI, GIVEN, {"endpoint_url": "https://other.example"}, "endpoint_url is set"),
        (URI, GIVEN, {"aws_endpoint_url": "https://other.example"}, "aws_endpoint_url is set"),
        (URI, GIVEN, {"Token": "c"}, "Token is set"),
        (URI, GIVEN, {"PROXY_URL": "http://other.example"}, "PROXY_URL is set"),
        (URI, GIVEN, {"AWS_DEFAULT_REGION": "us-east-1"}, "AWS_DEFAULT_REGION contradicts"),
        (
            URI,
            {**KEYS, "AWS_DEFAULT_REGION": "a"},
            {"AWS_REGION": "b"},
            "AWS_REGION contradicts",
        ),
        (URI, {**GIVEN, "region": "us-east-1"}, {}, "region is set twice"),
        (URI, KEYS, {"AWS_REGION": "a", "AWS_DEFAULT_REGION": "b"}, "AWS_DEFAULT_REGION is set"),
        (URI, {**GIVEN, "AWS_S3_LOCKING_PROVIDER": "dynamodb"}, {}, "AWS_S3_LOCKING_PROVIDER"),
        (URI, {**GIVEN, "AWS_CONDITIONAL_PUT": "dynamo:locks"}, {}, "not etag"),
        (URI, {**GIVEN, "proxy_url": "http://other.example"}, {}, "proxy_url"),
        (URI, {**GIVEN, "timeout": "soon"}, {}, "can't be read"),
        (URI, {**GIVEN, "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "maybe"}, {}, "can't be read"),
    ],
)
def test_whatever_else_goes_through_deltalake(
    uri: str, options: dict[str, str], environment: dict[str, str], why: str
) -> None:
    with pytest.raises(NotSureError, match=why):
        s3_objects(uri, options, environment)

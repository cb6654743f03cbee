"""Nothing secret gets through the redactor."""

from __future__ import annotations

import json
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict

from ingestd.config.redaction import MASK, Redactor, secrets_in_environment
from ingestd.model.lsn import Lsn


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("host=db password=hunter2 dbname=x", "host=db password=*** dbname=x"),
        ("password='a \\'b c' user=x", "password=*** user=x"),
        ("PGPASSWORD=hunter2", "PGPASSWORD=***"),
        ("host=h password=tr0ub4dor,horse;battery dbname=x", "host=h password=*** dbname=x"),
        ("password=a'b\"c&d sslpassword = x\\ y,z u=v", "password=*** sslpassword = *** u=v"),
        ("password=two\\ words host=h", "password=*** host=h"),
        ("bad DSN 'host=h password=it\\'s': no", "bad DSN 'host=h password=***': no"),
        ("('password=a,b', 1)", "('password=***', 1)"),
        ("postgresql://u:hunter2@h:5432/db", "postgresql://u:***@h:5432/db"),
        ("postgresql://u:p:w@d@h/db", "postgresql://u:***@h/db"),
        ('{"aws_secret_access_key": "abc"}', '{"aws_secret_access_key": ***}'),
        ("failed\nDETAIL:  Key (email)=(a@b.c) exists.\nHINT: x", "failed\nDETAIL: ***\nHINT: x"),
        ("http://127.0.0.1:9464/status", "http://127.0.0.1:9464/status"),
        ("sslpassword=hunter2 sslkey=/k.pem", "sslpassword=*** sslkey=/k.pem"),
        (
            "postgresql://h/d?password=a%26b&sslmode=require",
            "postgresql://h/d?password=***&sslmode=require",
        ),
        (
            "AccountName=a;AccountKey=abc==;EndpointSuffix=x",
            "AccountName=a;AccountKey=***;EndpointSuffix=x",
        ),
        ("https://a.blob.core/c?sv=2020&sig=ab%2Fc%3D", "https://a.blob.core/c?sv=2020&sig=***"),
        ("GET /x?X-Amz-Signature=abc123&X-Amz-Date=1", "GET /x?X-Amz-Signature=***&X-Amz-Date=1"),
        ("x-amz-security-token: FwoGZXIvYXdzEBYaDK", "x-amz-security-token: ***"),
        ("{'aws_session_token': 'abc', 'b': 1}", "{'aws_session_token': ***, 'b': 1}"),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("{'Authorization': 'Basic dTpw'}", "{'Authorization': '***'}"),
        ("sent bearer 0123456789abcdef0123", "sent bearer ***"),
        ("mask_key = 'sesame'", "mask_key = ***"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\nx", "***\nx"),
        (
            "Trace:\npsycopg.errors.InvalidTextRepresentation: bad: \"a@b.c\"\nLINE 1: 'a@b.c'",
            "Trace:\npsycopg.errors.InvalidTextRepresentation: ***\nLINE 1: ***",
        ),
        # what is no secret
        ("http.token: is not a token: 16 or more", "http.token: is not a token: 16 or more"),
        ('token = "env:T" in [http]', 'token = "env:T" in [http]'),
        ("password: authentication failed", "password: authentication failed"),
        ("password='...' in `dsn`", "password='...' in `dsn`"),
        ("primary_key=id foreign key: x", "primary_key=id foreign key: x"),
        ("signal: 9, design=x, keys: 3", "signal: 9, design=x, keys: 3"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, shown: str) -> None:
    assert Redactor().text(text) == shown


def test_a_known_dsn_goes_whole_and_in_parts() -> None:
    redact = Redactor(["postgresql://u:hunt%20er2@h/db", "host=x password='s e\\'same'"]).text
    assert redact("at postgresql://u:hunt%20er2@h/db") == "at ***"
    assert redact("hunt er2 and hunt%20er2 and s e'same") == "*** and *** and ***"


@pytest.mark.slow
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=3), st.text(), st.text())
def test_a_known_secret_is_never_shown(secret: str, before: str, after: str) -> None:
    shown = Redactor([secret]).text(before + secret + after)
    assert secret not in shown or secret in MASK or MASK in secret or secret in before + after


@pytest.mark.parametrize(
    "password", ["p@ss w/rd", "it's", 'a"b\\c', "ünï:&=?", "100%", "a+b c", "$(x) `y`", "'q' w"]
)
def test_a_password_goes_however_it_is_written(password: str) -> None:
    libpq = "password='" + password.replace("\\", "\\\\").replace("'", "\\'") + "'"
    for dsn in (f"host=h {libpq} dbname=d", f"postgresql://u:{quote(password, safe='')}@h/d"):
        redact = Redactor([dsn]).text
        for written in (
            password,
            quote(password),
            quote(password, safe=""),
            quote_plus(password),
            repr(password),
            json.dumps(password),
            f"{libpq}, more",
            repr({"dsn": dsn}),
            repr(repr(dsn))[1:-1],
        ):
            shown = redact(f"the driver said {written}; and went on")
            assert password not in shown
            assert written not in shown
            assert "***" in shown


@pytest.mark.parametrize(
    ("dsn", "password"),
    [
        ("host=h password=tr0ub4dor,horse;battery dbname=x", "tr0ub4dor,horse;battery"),
        ("host=h password=two\\ words dbname=x", "two words"),
        ("host=h password=it\\'s dbname=x", "it's"),
        ("password=a'b\"c&d\\\\e", "a'b\"c&d\\e"),
    ],
)
def test_a_password_without_quotes_goes_as_libpq_reads_it(dsn: str, password: str) -> None:
    assert conninfo_to_dict(dsn)["password"] == password
    redact = Redactor([dsn]).text
    assert redact(f"the password is {password} now") == "the password is *** now"
    written = dsn.partition("password=")[2].removesuffix(" dbname=x")
    for text in (f"{written} at", f"{written!r} at", f"{json.dumps(written)} at"):
        assert redact(text).strip("'\"") in {"*** at", "***' at", '***" at'}
    for end in ("", " sslmode=require"):
        assert Redactor().text(f"x password={written}{end}") == f"x password=***{end}"


def test_a_secret_of_several_lines_goes_line_by_line() -> None:
    key = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\nAQEF\n-----END PRIVATE KEY-----\n"
    account = json.dumps({"type": "service_account", "private_key": key, "client_email": "a@b"})
    for secret in (key, account):
        redact = Redactor([secret]).text
        for written in (secret, key, repr(key), "line: MIIEvQIBADANBgkqhkiG9w0B", json.dumps(key)):
            assert "MIIEvQIBADANBgkqhkiG9w0B" not in redact(f"x {written} y")
    assert Redactor([account]).text("service_account of a@b") == "service_account of a@b"


def test_what_the_environment_gives_drivers_is_secret() -> None:
    environ = {
        "PGPASSWORD": "hunter2-from-env",
        "AWS_SECRET_ACCESS_KEY": "from/env+1234",
        "AWS_SESSION_TOKEN": "token-1234",
        "AZURE_STORAGE_ACCOUNT_KEY": "account-1234",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token",
        "AWS_REGION": "eu-central-1",
        "PGSSLKEY": "/etc/ssl/key.pem",
        "PATH": "/usr/local/bin",
        "AWS_EC2_TOKEN": "off",
    }
    assert secrets_in_environment(environ) == [
        "hunter2-from-env", "from/env+1234", "token-1234", "account-1234",
    ]  # fmt: skip


def test_trees_become_json_without_secrets() -> None:
    tree = {"a": ["sesame", 1, None, True, 1.5], "sesame": {"b": Lsn(0x10)}, "c": b"sesame"}
    assert Redactor(["sesame"]).tree(tree) == {
        "a": [MASK, 1, None, True, 1.5],
        MASK: {"b": "0/10"},
        "c": "<6 bytes>",
    }


def test_the_repr_shows_nothing() -> None:
    assert "sesame" not in repr(Redactor(["sesame"]))

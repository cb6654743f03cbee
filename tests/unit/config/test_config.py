"""The config file: what it means, and the errors of an invalid one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ingestd.config import Config, TableSettings, load_config
from ingestd.config.units import Address
from ingestd.model.errors import ConfigError
from ingestd.model.schema import TableId
from ingestd.postgres.settings import (
    SETTINGS,
    PolledTableSettings,
    PollingSettings,
    WalSettings,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).parents[3]
DSN = "postgresql://shop:hunt%20er2@db.example/shop"
BASE = """
[lake]
uri = "./lake"
[sources.shop]
kind = "wal"
dsn = "env:SHOP_DSN"
tables = ["public.*", "!public.audit_*"]
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Config]:
    def loader(text: str, environ: Mapping[str, str] | None = None) -> Config:
        path = tmp_path / "ingestd.toml"
        path.write_text(text, "utf-8")
        return load_config(path, SETTINGS, {"SHOP_DSN": DSN} if environ is None else environ)

    return loader


@pytest.fixture
def refusal(load: Callable[..., Config]) -> Callable[..., list[str]]:
    def refused(text: str, environ: Mapping[str, str] | None = None) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, environ)
        return str(caught.value).splitlines()

    return refused


def wal(config: Config, name: str = "shop") -> WalSettings:
    source = config.sources[name]
    assert isinstance(source, WalSettings)
    return source


def test_a_lake_in_a_home(load: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/etl")
    assert load(BASE.replace("./lake", "~/lake/")).lake.uri == "/home/etl/lake"


def test_defaults_are_those_of_the_design(load: Callable[..., Config]) -> None:
    config = load(BASE)
    assert config.lake.uri == "./lake"
    assert config.lake.storage_options == {}
    assert (config.epoch.max_delay, config.epoch.max_bytes) == (5.0, 64_000_000)
    assert config.limits.memory == 512_000_000
    assert config.http.listen == Address("127.0.0.1", 9464)
    assert (config.log.level, config.log.format) == ("info", "auto")
    source = wal(config)
    assert source.dsn.get_secret_value() == DSN
    assert (source.slot, source.publication) == ("ingestd_shop", "ingestd_shop")
    assert (source.manage, source.snapshot, source.snapshot_workers) == (True, "initial", 2)
    assert (source.before, source.mask_key) == ("key", None)
    assert (source.slot_lost, source.on_rewrite) == ("resnapshot", "resnapshot")
    assert source.discover_interval == 15.0


@pytest.mark.parametrize(
    ("written", "meant"),
    [("500ms", 0.5), ("5s", 5.0), ("1.5s", 1.5), ("1m", 60.0), ("2h", 7200.0), ("1d", 86400.0)],
)
def test_durations(load: Callable[..., Config], written: str, meant: float) -> None:
    assert load(f'{BASE}\n[epoch]\nmax_delay = "{written}"').epoch.max_delay == meant


@pytest.mark.parametrize("written", ['"5"', '"5 parsecs"', "5", '"-5s"', '"0s"', "true", '"5S"'])
def test_bad_durations_are_refused(refusal: Callable[..., list[str]], written: str) -> None:
    (line,) = refusal(f"{BASE}\n[epoch]\nmax_delay = {written}")
    assert line.startswith("epoch.max_delay: not a duration; write a number above 0")


@pytest.mark.parametrize(
    ("written", "meant"),
    [("64MB", 64 * 10**6), ("64MiB", 64 * 2**20), ("1.5GB", 1_500_000_000), ("900 kB", 900_000)],
)
def test_sizes(load: Callable[..., Config], written: str, meant: int) -> None:
    assert load(f'{BASE}\n[epoch]\nmax_bytes = "{written}"').epoch.max_bytes == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("off", None),
        ("0.0.0.0:80", Address("0.0.0.0", 80)),
        ("[::1]:0", Address("::1", 0)),
        ("localhost:9464", Address("localhost", 9464)),
    ],
)
def test_listen(load: Callable[..., Config], written: str, meant: Address | None) -> None:
    assert load(f'{BASE}\n[http]\nlisten = "{written}"').http.listen == meant


def test_http_is_guarded_by_token_and_certificate(load: Callable[..., Config]) -> None:
    text = f'{BASE}\n[http]\ntoken = "env:T"\ntls_cert = "a.crt"\ntls_key = "a.key"'
    config = load(text, {"SHOP_DSN": DSN, "T": "0123456789abcdef"})
    assert config.http.token is not None
    assert config.http.token.get_secret_value() == "0123456789abcdef"
    assert (config.http.tls_cert, config.http.tls_key) == ("a.crt", "a.key")
    assert "0123456789abcdef" not in repr(config)
    assert config.redactor.text("it is 0123456789abcdef") == "it is ***"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('token = "short"', "http.token: is not a token: 16 or more of"),
        ('token = "with a space in it"', "http.token: is not a token: 16 or more of"),
        ('token = "with-ümlauts-in-it-too"', "http.token: is not a token: 16 or more of"),
        ('token = "0123456789abcdef\\n"', "http.token: is not a token: 16 or more of"),
        ('tls_cert = "a.crt"', "http.tls_cert: needs 'tls_key' too"),
        ('tls_key = "a.key"', "http.tls_key: needs 'tls_cert' too"),
        ('tls_cert = "-----BEGIN"\ntls_key = "k"', "http.tls_cert: is not a path"),
        ('tls_cert = ""\ntls_key = "k"', "http.tls_cert: is not a path"),
        ('listen = "off"\ntoken = "0123456789abcdef"', "http.token: has no effect with listen"),
        ('tokens = "0123456789abcdef"', "http.tokens: unknown key; did you mean 'token'?"),
    ],
)
def test_a_guard_that_cannot_be_is_refused(
    refusal: Callable[..., list[str]], lines: str, told: str
) -> None:
    (line,) = refusal(f"{BASE}\n[http]\n{lines}")
    assert line.startswith(told)
    assert "0123456789abcdef" not in line


@pytest.mark.parametrize("written", ['"9464"', '"::1:80"', '"h:70000"', "9464", '"no"', '""'])
def test_bad_listen_is_refused(refusal: Callable[..., list[str]], written: str) -> None:
    (line,) = refusal(f"{BASE}\n[http]\nlisten = {written}")
    assert line.startswith("http.listen: not an address; write 'host:port'")


def test_a_reference_to_a_file_is_relative_to_the_config(
    load: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/dsn").write_text("host=db dbname=shop password='a b'\n")
    config = load(BASE.replace("env:SHOP_DSN", "file:secrets/dsn"), {})
    assert wal(config).dsn.get_secret_value() == "host=db dbname=shop password='a b'"


def test_any_string_may_be_a_reference(load: Callable[..., Config]) -> None:
    text = BASE.replace('"public.*"', '"env:T"') + '[epoch]\nmax_delay = "env:D"'
    config = load(text, {"SHOP_DSN": DSN, "T": "app.*", "D": "2s"})
    assert config.epoch.max_delay == 2.0
    assert wal(config).tables == ["app.*", "!public.audit_*"]


def test_a_missing_variable_is_named(refusal: Callable[..., list[str]]) -> None:
    assert refusal(BASE, {}) == ["sources.shop.dsn: environment variable SHOP_DSN is not set"]


def test_a_missing_file_is_named(refusal: Callable[..., list[str]]) -> None:
    lines = refusal(BASE.replace("env:SHOP_DSN", "file:no/dsn"))
    assert lines == ["sources.shop.dsn: file 'no/dsn' can't be read: No such file or directory"]


def test_a_missing_variable_of_a_typed_key_is_reported_once(
    refusal: Callable[..., list[str]],
) -> None:
    lines = refusal(f'{BASE}\n[epoch]\nmax_delay = "env:DELAY"')
    assert lines == ["epoch.max_delay: environment variable DELAY is not set"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("tables =", "tabels ="), "sources.shop.tabels: unknown key; did you mean 'tables'?"),
        (("dsn =", "kinds = 1\ndsn ="), "sources.shop.kinds: unknown key; valid keys: kind, dsn, "),
        (("[lake]", "[lakes]"), "lakes: unknown key; did you mean 'lake'?"),
        (("kind =", "zzz = 1\nkind ="), "sources.shop.zzz: unknown key; valid keys: kind, dsn, "),
        (('kind = "wal"\n', ""), "sources.shop.kind: is missing; available: 'polling', 'wal'"),
        (('"wal"', '"cdc"'), "sources.shop.kind: unknown or not available; available: 'polling',"),
        (("dsn =", "manage = 'yes'\ndsn ="), "sources.shop.manage: must be true or false"),
        (
            ("dsn =", "snapshot = 'no'\ndsn ="),
            "sources.shop.snapshot: must be 'initial' or 'never'",
        ),
        (("dsn =", "slot = 'My-Slot'\ndsn ="), "sources.shop.slot: must match ^[a-z0-9_]{1,63}$"),
        (("dsn =", "snapshot_workers = 0\ndsn ="), "sources.shop.snapshot_workers: must be at lea"),
        (("dsn =", "publication = ''\ndsn ="), "sources.shop.publication: must be 1-63 bytes long"),
        (('["public.*", "!', '["!'), "sources.shop.tables: only exclusions; add what to capture"),
        (('["public.*", ', '["orders", '), "sources.shop.tables[0]: write it as schema.table"),
        (('"./lake"', '"hdfs://x/y"'), "lake.uri: unknown scheme; use a path or one of s3, "),
        (('"./lake"', '"~nobody-has-this/lake"'), "lake.uri: the home directory in it is unknown"),
        (('"./lake"', '"s3:/b/lake"'), "lake.uri: is not a path; write 's3://b/lake' for a store"),
        (('"./lake"', '"./100%"'), "lake.uri: deltalake can't use a local path with '%' in it"),
        (('"./lake"', '""'), "lake.uri: is empty"),
        (("sources.shop", "sources.Shop"), "sources.Shop: a source's name is 1-55 of a-z, 0-9"),
        (("sources.shop", "sources._s"), "sources._s: a source's name is 1-55 of a-z, 0-9"),
    ],
)
def test_faults_are_reported_with_the_key_path(
    refusal: Callable[..., list[str]], change: tuple[str, str], line: str
) -> None:
    (found,) = refusal(BASE.replace(*change))
    assert found.startswith(line)


def test_all_faults_are_reported_at_once(refusal: Callable[..., list[str]]) -> None:
    text = BASE.replace("tables =", "tabels =") + "[epoch]\nmax_dely = '5s'\nmax_bytes = 5"
    assert [line.split(":")[0] for line in refusal(text)] == [
        "sources.shop.tabels",
        "epoch.max_bytes",
        "epoch.max_dely",
    ]


def test_two_sources_can_not_share_a_slot(
    load: Callable[..., Config], refusal: Callable[..., list[str]]
) -> None:
    twice = BASE + BASE[BASE.index("[sources") :].replace("shop]", "crm]")
    assert set(load(twice).sources) == {"shop", "crm"}
    lines = refusal(twice + 'slot = "ingestd_shop"')
    assert lines == ["sources.crm.slot: the same as in sources.shop, on the same database"]


def test_no_sources(refusal: Callable[..., list[str]]) -> None:
    lines = refusal('[lake]\nuri = "./lake"')
    assert lines == ["sources: none configured; add a section [sources.NAME]"]


def test_table_settings_of_a_table_not_captured_are_refused(
    refusal: Callable[..., list[str]],
) -> None:
    lines = refusal(f'{BASE}\n[sources.shop.table."public.audit_log"]')
    assert lines == ["sources.shop.table.\"public.audit_log\": no pattern of 'tables' includes it"]


ORDERS = '[sources.shop.table."public.orders"]'


@pytest.mark.parametrize("reference", ["snapshot_plus_cdc", "manual"])
def test_refresh_of_a_table_that_is_not_read_again_is_refused(
    refusal: Callable[..., list[str]], reference: str
) -> None:
    lines = refusal(f'{BASE}{ORDERS}\nreference = "{reference}"\nrefresh = "1h"\n')
    at = 'sources.shop.table."public.orders".refresh'
    assert lines == [f'{at}: applies to reference = "snapshot_only", not "{reference}"; remove it']


def test_reference_tables(load: Callable[..., Config]) -> None:
    table = TableId("public", "orders")
    found = load(f'{BASE}{ORDERS}\nreference = "snapshot_only"\nrefresh = "5m"\n').sources["shop"]
    assert [t.refresh_s for t in found.references().values()] == [300]
    assert not found.streams(table)
    found = load(f'{BASE}{ORDERS}\nreference = "snapshot_plus_cdc"\n').sources["shop"]
    assert list(found.references()) == [table]
    assert found.streams(table)
    found = load(f'{BASE}{ORDERS}\nreference = "off"\nrefresh = "1h"\n').sources["shop"]
    assert not found.references()


def test_columns_are_controlled_by_table(load: Callable[..., Config]) -> None:
    text = f"""{BASE}
mask_key = "env:KEY"
on_rewrite = "record"
{ORDERS}
exclude_columns = ["note"]
mask_columns = {{ email = "sha256", phone = "null" }}
types = {{ amount = "decimal(12,2)" }}
"""
    source = wal(load(text, {"SHOP_DSN": DSN, "KEY": "grüße"}))
    controls = source.controls(TableId("public", "orders"))
    assert controls.exclude_columns == ["note"]
    assert controls.mask_columns == {"email": "sha256", "phone": "null"}
    assert controls.types == {"amount": "decimal(12,2)"}
    assert source.mask_key_bytes == "grüße".encode()
    assert source.on_rewrite == "record"
    assert source.controls(TableId("public", "other")) == TableSettings()


def test_a_mask_key_may_be_in_a_file_and_is_secret(
    load: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("open sesame\n")
    config = load(f'{BASE}mask_key = "file:key"')
    assert wal(config).mask_key_bytes == b"open sesame"
    assert "sesame" not in repr(config)
    assert "sesame" not in config.redactor.text("it is open sesame")


@pytest.mark.parametrize(
    ("controls", "line"),
    [
        (
            'mask_columns = { email = "sha256" }',
            "mask_columns.email: sha256 needs a key; set the source's 'mask_key'",
        ),
        ('mask_columns = { email = "md5" }', "mask_columns.email: must be 'sha256' or 'null' (not"),
        (
            'exclude_columns = ["a"]\nmask_columns = { a = "null" }',
            "mask_columns.a: is also in 'exclude_columns'; remove it from one of the two",
        ),
        (
            'exclude_columns = ["a"]\ntypes = { a = "string" }',
            "types.a: is also in 'exclude_columns'; remove it from one of the two",
        ),
        (
            'mask_columns = { a = "sha256" }\ntypes = { a = "string" }',
            "types.a: is masked with sha256, so its type is string; remove it from 'types'",
        ),
        ('exclude_columns = ["b", "a", "b"]', "exclude_columns[2]: 'b' is listed twice"),
        ("exclude_columns = [1]", "exclude_columns[0]: must be a string"),
        ('exclude_column = ["a"]', "exclude_column: unknown key; did you mean 'exclude_columns'?"),
    ],
)
def test_contradictory_controls_are_refused(
    refusal: Callable[..., list[str]], controls: str, line: str
) -> None:
    (found,) = refusal(f"{BASE}{ORDERS}\n{controls}\n")
    assert found.startswith(f'sources.shop.table."public.orders".{line}')


@pytest.mark.parametrize("key", ['""', '"  "', "5"])
def test_a_mask_key_that_is_none_is_refused(refusal: Callable[..., list[str]], key: str) -> None:
    (line,) = refusal(f"{BASE}mask_key = {key}\n")
    assert line.startswith("sources.shop.mask_key: ")


def test_a_schema_with_a_dot_is_quoted(
    load: Callable[..., Config], refusal: Callable[..., list[str]]
) -> None:
    text = BASE.replace('"public.*"', "'\"a.b\".*', '\"!c\".t'")
    section = "[sources.shop.table.'\"a.b\".x.y']\nexclude_columns = ['n']\n"
    source = wal(load(text + section))
    assert source.includes("a.b", "x.y")
    assert source.includes("!c", "t")
    assert not source.includes("a", "b.x.y")
    assert source.controls(TableId("a.b", "x.y")).exclude_columns == ["n"]
    lines = refusal(text + section.replace("x.y", "*") + '[sources.shop.table."a"]')
    assert [line.split(": ")[1] for line in lines] == [
        "write it as schema.table, like 'public.orders'"
    ]


def test_one_section_per_table(refusal: Callable[..., list[str]]) -> None:
    again = ORDERS.replace('"public.orders"', "'\"public\".orders'")
    (line,) = refusal(f"{BASE}{ORDERS}\n{again}\n")
    assert line.endswith("is the same table as 'public.orders'; keep one of them")


def test_a_default_may_be_written_out(load: Callable[..., Config]) -> None:
    text = f'{BASE}on_rewrite = "resnapshot"\n[sources.shop.table."public.orders"]\n'
    loaded = load(f'{text}reference = "off"')
    assert loaded.sources["shop"].table["public.orders"].reference == "off"


def test_syntax_errors_tell_line_and_column(refusal: Callable[..., list[str]]) -> None:
    (line,) = refusal("[lake]\nuri = \n")
    assert re.search(r"ingestd\.toml: not TOML: .*at line 2, column 7", line)


def test_a_missing_config_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml: the config file can't be read: No such"):
        load_config(tmp_path / "gone.toml", SETTINGS, {})


@pytest.mark.parametrize(
    "bad", ["dsn hunter2", "postgresql://u:hunter2@[::1/x", "host=x password=hunter2 nokey=1"]
)
def test_an_unreadable_dsn_is_not_quoted(refusal: Callable[..., list[str]], bad: str) -> None:
    (line,) = refusal(BASE, {"SHOP_DSN": bad})
    assert line.startswith("sources.shop.dsn: not a connection string")
    assert "hunter2" not in line


def test_a_referenced_value_is_not_quoted(refusal: Callable[..., list[str]]) -> None:
    text = f'{BASE}\n[epoch]\nmax_delay = "env:D"\n[log]\nlevel = "env:D"'
    lines = refusal(text, {"SHOP_DSN": DSN, "D": "hunter2"})
    assert len(lines) == 2
    assert "hunter2" not in "".join(lines)


def test_nothing_secret_is_in_any_repr(load: Callable[..., Config]) -> None:
    text = BASE.replace('"./lake"', '"env:LAKE"') + '[lake.storage_options]\nAWS_KEY = "sesame"'
    config = load(text, {"SHOP_DSN": DSN, "LAKE": "s3://hidden-bucket"})
    for text in (repr(config), str(config), repr(config.sources), repr(config.lake)):
        for secret in ("hunt", "sesame", "hidden-bucket"):
            assert secret not in text


def test_the_redactor_knows_the_secrets_of_the_config(load: Callable[..., Config]) -> None:
    text = f'{BASE}[lake.storage_options]\nAWS_SECRET_ACCESS_KEY = "sesame"\nAWS_REGION = "eu"'
    redact = load(text).redactor.text
    assert redact(f"cannot connect to {DSN}: hunt er2, sesame") == "cannot connect to ***: ***, ***"
    assert redact("reunion in eu") == "reunion in eu"


def test_the_redactor_knows_passwords_as_libpq_reads_them(load: Callable[..., Config]) -> None:
    dsn = "host=h password=...two\\ words sslpassword = 'it\\'s one'"
    redact = load(BASE.replace("env:SHOP_DSN", "env:ODD"), {"ODD": dsn}).redactor.text
    assert redact("of ...two words and it's one.") == "of *** and ***."


@pytest.mark.parametrize(
    ("table", "captured"),
    [
        (("public", "orders"), True),
        (("public", "audit_log"), False),
        (("Public", "orders"), False),
        (("app", "orders"), False),
        (("public", "odd.name"), True),
    ],
)
def test_patterns_choose_tables(
    load: Callable[..., Config],
    table: tuple[str, str],
    captured: bool,  # noqa: FBT001
) -> None:
    assert load(BASE).sources["shop"].includes(*table) is captured


def test_maintenance(load: Callable[..., Config]) -> None:
    found = load(BASE).maintenance
    assert (found.compact, found.target_bytes, found.retention) == (3600, 128_000_000, 7 * 86400)
    found = load(f'{BASE}\n[maintenance]\ncompact = "off"\nretention = "off"').maintenance
    assert (found.compact, found.target_bytes, found.retention) == (None, None, None)
    found = load(f'{BASE}\n[maintenance]\ntarget_file_size = "64MB"').maintenance
    assert found.target_bytes == 64_000_000


@pytest.mark.parametrize(
    ("written", "line"),
    [
        (
            'compact = "off"\ntarget_file_size = "1GB"',
            "maintenance.target_file_size: has no effect with",
        ),
        ('retention = "1m"', "maintenance.retention: readers that are further behind can't resume"),
        ('target_file_size = "1kB"', "maintenance.target_file_size: must be at least 1000000"),
        ('compact = "sometimes"', "maintenance.compact: not a duration"),
        (
            'log_retention = "7d"',
            "maintenance.log_retention: unknown key; did you mean 'retention'?",
        ),
    ],
)
def test_maintenance_that_contradicts_itself_is_refused(
    refusal: Callable[..., list[str]], written: str, line: str
) -> None:
    [found] = refusal(f"{BASE}\n[maintenance]\n{written}")
    assert found.startswith(line)


def test_the_example_loads() -> None:
    environ = {"SHOP_DSN": DSN}
    config = load_config(ROOT / "config.example.toml", SETTINGS, environ)
    assert wal(config).tables == ["public.*", "!public.audit_*"]


def test_the_example_names_every_key() -> None:
    text = (ROOT / "config.example.toml").read_text("utf-8")
    models = [*(f.annotation for f in Config.model_fields.values()), *SETTINGS.values()]
    models += [TableSettings, PolledTableSettings]
    keys = {key for model in models for key in getattr(model, "model_fields", {})}
    missing = [k for k in keys - {"table"} if not re.search(rf"^(# )?{k} = ", text, re.MULTILINE)]
    assert missing == ["storage_options"]
    assert "[lake.storage_options]" in text


POLLED = BASE.replace('"wal"', '"polling"')


def polling(config: Config, name: str = "shop") -> PollingSettings:
    source = config.sources[name]
    assert isinstance(source, PollingSettings)
    return source


def test_defaults_of_polling(load: Callable[..., Config]) -> None:
    source = polling(load(POLLED))
    assert (source.interval, source.discover_interval, source.page_rows) == (10.0, 15.0, 10_000)
    assert (source.statement_timeout, source.lock_timeout, source.listen) == (60.0, 5.0, None)
    assert (source.snapshot, source.snapshot_workers, source.on_rewrite) == (
        "initial",
        2,
        "resnapshot",
    )
    controls = source.controls(TableId("public", "orders"))
    assert (controls.cursor, controls.key, controls.deleted) == (None, None, None)
    assert (controls.detect_deletes, controls.interval) == (None, None)


def test_a_polled_table_says_how(load: Callable[..., Config]) -> None:
    text = f"""{POLLED}
interval = "1s"
statement_timeout = "0"
lock_timeout = "500ms"
listen = "Orders changed"
{ORDERS}
cursor = "updated_at"
key = ["shop", "id"]
detect_deletes = "10m"
deleted = "deleted_at"
interval = "1m"
exclude_columns = ["note", "deleted_at"]
[sources.shop.table."public.lines"]
cursor = ["day", "id"]
detect_deletes = "off"
"""
    source = polling(load(text))
    assert (source.statement_timeout, source.lock_timeout) == (0.0, 0.5)
    assert source.listen == "Orders changed"
    orders = source.controls(TableId("public", "orders"))
    assert (orders.cursor, orders.key) == (["updated_at"], ["shop", "id"])
    assert (orders.detect_deletes, orders.deleted, orders.interval) == (600.0, "deleted_at", 60.0)
    lines = source.controls(TableId("public", "lines"))
    assert (lines.cursor, lines.detect_deletes) == (["day", "id"], None)


def test_two_polled_sources_may_share_a_database(load: Callable[..., Config]) -> None:
    twice = POLLED + POLLED[POLLED.index("[sources") :].replace("shop]", "crm]")
    assert set(load(twice).sources) == {"shop", "crm"}


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ('slot = "s"', "slot: unknown key; "),
        ('before = "full"', "before: unknown key; "),
        ('interval = "0s"', "interval: not a duration; "),
        ("page_rows = 0", "page_rows: must be at least 1"),
        ('statement_timeout = "5"', "statement_timeout: not a duration; "),
        ("lock_timeout = [1]", "lock_timeout: not a duration; "),
        ('listen = ""', "listen: must be 1-63 bytes long"),
        (f"listen = '{64 * 'x'}'", "listen: must be 1-63 bytes long"),
    ],
)
def test_faults_of_a_polled_source(refusal: Callable[..., list[str]], key: str, line: str) -> None:
    (found,) = refusal(f"{POLLED}{key}\n")
    assert found.startswith(f"sources.shop.{line}")


@pytest.mark.parametrize(
    ("controls", "line"),
    [
        ("cursor = 5", "cursor: must be a list, like ['a', 'b']"),
        ("cursor = [5]", "cursor[0]: must be a string"),
        ("cursor = []", "cursor: is empty; write a column's name"),
        ('cursor = ""', "cursor: is empty; write a column's name"),
        ('cursor = ["a", "a"]', "cursor: names a column twice"),
        ("key = []", "key: is empty; write a column's name"),
        ('key = "id"', "key: must be a list, like ['a', 'b']"),
        ('detect_deletes = "no"', "detect_deletes: not a duration; "),
        ("detect_deletes = false", "detect_deletes: not a duration; "),
        ('deleted = ""', "deleted: must be 1-63 bytes long"),
        (
            'key = ["a", "id"]\nexclude_columns = ["id"]',
            "key[1]: is also in 'exclude_columns'; rows can't be distinguished without it",
        ),
        (
            'key = ["id"]\nmask_columns = { id = "null" }',
            "key[0]: is masked with null, and rows can't be distinguished without it; use sha256",
        ),
        ('key = ["id"]\ndeleted = "id"', "key[0]: is also 'deleted', which changes when"),
        ('curser = "id"', "curser: unknown key; did you mean 'cursor'?"),
    ],
)
def test_faults_of_a_polled_table(
    refusal: Callable[..., list[str]], controls: str, line: str
) -> None:
    (found,) = refusal(f"{POLLED}{ORDERS}\n{controls}\n")
    assert found.startswith(f'sources.shop.table."public.orders".{line}')


@pytest.mark.parametrize(
    "key",
    ['cursor = "a"', 'key = ["a"]', 'detect_deletes = "1h"', 'deleted = "a"', 'interval = "1m"'],
)
def test_a_streamed_table_is_not_polled(refusal: Callable[..., list[str]], key: str) -> None:
    (found,) = refusal(f"{BASE}{ORDERS}\n{key}\n")
    name = key.split(" ", 1)[0]
    assert found.startswith(f'sources.shop.table."public.orders".{name}: unknown key; ')


@pytest.mark.parametrize("reference", ["snapshot_only", "manual"])
@pytest.mark.parametrize(
    "key", ['cursor = "a"', 'detect_deletes = "1h"', 'deleted = "a"', 'interval = "1m"']
)
def test_a_table_of_current_rows_only_is_not_polled(
    load: Callable[..., Config], refusal: Callable[..., list[str]], reference: str, key: str
) -> None:
    text = f'{POLLED}{ORDERS}\nreference = "{reference}"\nkey = ["id"]\n'
    assert load(text)
    (found,) = refusal(f"{text}{key}\n")
    name = key.split(" ", 1)[0]
    assert found.startswith(
        f"sources.shop.table.\"public.orders\".{name}: is not used with reference = '{reference}'"
    )

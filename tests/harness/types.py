"""Every built-in type that a table can have, with its lake column, ordinary and odd values.

The mapping is written out here, independently of `ingestd.decode.type_mapping`. A value is the text
of an SQL literal, or an SQL expression (`Sql`) if the type's input function accepts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTROLS = "".join(map(chr, [*range(1, 32), 127]))
LONG_NUMBER = "1234567890" * 50 + "." + "0987654321" * 50
JSON = '{"b" : 1,  "a":[null,\t"é"] , "b": 2}'
ALL_BYTES = "\\x" + bytes(range(256)).hex()


class Sql(str):
    """An SQL expression."""

    __slots__ = ()


Values = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Type:
    """A type as SQL writes it, and the Delta type of its column.

    `values` belong in the column, `odd` ones in `_cdc_raw`. `elements`: the Delta type of an array,
    ``array<delta>`` by default; empty if Postgres has no such array. `since`: the first major
    version of the server with this type.
    """

    name: str
    delta: str
    values: Values = ()
    odd: Values = ()
    elements: str | None = None
    since: int = 0

    @property
    def array_delta(self) -> str:
        return f"array<{self.delta}>" if self.elements is None else self.elements

    def expressions(self) -> list[sql.Composable]:
        """Return SQL of every value, and of null."""
        return [self._expression(v) for v in (*self.values, *self.odd)] + [self.null]

    @property
    def null(self) -> sql.Composable:
        return sql.SQL(f"NULL::{self.name}")

    def _expression(self, value: str) -> sql.Composable:
        literal = sql.SQL(value) if isinstance(value, Sql) else sql.Literal(value)
        return sql.SQL("({})::{}").format(literal, sql.SQL(self.name))

    def array_expressions(self) -> list[sql.Composable]:
        """Return SQL of arrays: empty, ordinary values with nulls, each odd value, other shapes.

        The other shapes, with two dimensions or other bounds, use the text that any array has.
        """
        ordinary = [self._expression(v) for v in self.values] or [self.null]
        one = self._array(ordinary[:1])
        delimiter = sql.SQL("';'" if self.elements == "string" else "','")
        return [
            sql.SQL(f"'{{}}'::{self.name}[]"),
            self._array([*ordinary, self.null, ordinary[0], self.null]),
            self._array([self.null]),
            one,
            *(self._array([ordinary[0], self._expression(v), self.null]) for v in self.odd),
            sql.SQL("('[0:0]=' || concat({}))::{}[]").format(one, sql.SQL(self.name)),
            sql.SQL("('{{' || concat({0}) || {1} || concat({0}) || '}}')::{2}[]").format(
                one, delimiter, sql.SQL(self.name)
            ),
            sql.SQL(f"NULL::{self.name}[]"),
        ]

    def _array(self, elements: Sequence[sql.Composable]) -> sql.Composable:
        return sql.SQL("ARRAY[{}]::{}[]").format(sql.SQL(", ").join(elements), sql.SQL(self.name))


def _statistic(column: str) -> Sql:
    return Sql(f"SELECT {column} FROM pg_statistic_ext_data")


STRINGS = (
    "",
    " ",
    "a",
    "NULL",
    "null",
    "ü日本語",
    "😀",
    "{}",
    '"',
    "\\",
    "a,b;c",
    "\\x00",
    CONTROLS,
)

# fmt: off
BUILT_IN: tuple[Type, ...] = (
    Type("bool", "boolean", ("t", "f")),
    Type("int2", "short", ("0", "-1", "-32768", "32767")),
    Type("int4", "integer", ("0", "-1", "-2147483648", "2147483647")),
    Type("int8", "long", ("0", "-1", "-9223372036854775808", "9223372036854775807")),
    Type("oid", "long", ("0", "2147483648", "4294967295")),
    Type("float4", "float", ("0", "-0", "1", "0.1", "-1.5", "1e-45", "1.17549435e-38", "16777217",
                             "3.4028235e38", "999999", "1e6", "NaN", "Infinity", "-Infinity")),
    Type("float8", "double", ("0", "-0", "1", "0.1", "-1.5", "5e-324", "2.2250738585072014e-308",
                              "9007199254740993", "1.7976931348623157e308", "1e23", "1e15", "1e14",
                              "NaN", "Infinity", "-Infinity")),
    Type("numeric(10,2)", "decimal(10,2)", ("0", "-0.01", "1.5", "99999999.99", "-99999999.99"),
         ("NaN",)),
    Type("numeric(18,6)", "decimal(18,6)", ("0", "-0.000001", "999999999999.999999"), ("NaN",)),
    Type("numeric(38,0)", "decimal(38,0)", ("0", "9" * 38, "-" + "9" * 38, "1" + "0" * 37),
         ("NaN",)),
    Type("numeric(38,38)", "decimal(38,38)", ("0", "0." + "9" * 38, "-1e-38"), ("NaN",)),
    Type("numeric(5,-2)", "string", ("12345", "9999949", "-100", "NaN"), since=15),
    Type("numeric(3,5)", "string", ("0.00999", "-0.00001", "0"), since=15),
    Type("numeric(50,10)", "string", ("9" * 40 + ".0123456789", "-1", "NaN")),
    Type("numeric(39,0)", "string", ("9" * 39, "0")),
    Type("numeric", "string", ("0", "0.000", "-1.50", "1e-50", LONG_NUMBER, "-" + LONG_NUMBER,
                               "1e131071", "NaN", "Infinity", "-Infinity")),
    Type("money", "string", ("0", "-1234.5", "92233720368547758.07", "-92233720368547758.08")),
    Type("text", "string", STRINGS),
    Type("varchar", "string", STRINGS),
    Type("varchar(5)", "string", ("", "ab  ", "日本語です")),
    Type("char(6)", "string", ("", "ab", "日本", "a    b")),
    Type("char(1)", "string", ("", "x")),
    Type("bpchar", "string", ("", "ab  ", "日本")),
    Type('"char"', "string", ("", "a", "\\", " ", Sql('(-1)::int::"char"'))),
    Type("name", "string", ("", "größe", "a b", "x" * 63)),
    Type("bytea", "binary", ("\\x", "\\x00", "\\x5c", ALL_BYTES)),
    Type("date", "date", ("2024-02-29", "0001-01-01", "9999-12-31", "1969-12-31", "1970-01-01"),
         ("infinity", "-infinity", "0001-12-31 BC", "0044-03-15 BC", "4713-01-01 BC", "10000-01-01",
          "294276-12-31", "5874897-12-31")),
    Type("timestamp", "timestamp_ntz",
         ("2024-02-29 23:59:59.999999", "0001-01-01", "9999-12-31 23:59:59.999999",
          "1969-12-31 23:59:59.9", "1970-01-01", "2024-07-01 12:00:00.000001"),
         ("infinity", "-infinity", "0044-03-15 12:00:00.5 BC", "0001-12-31 23:59:59.999999 BC",
          "4713-01-01 BC", "10000-01-01", "294276-12-31 23:59:59.999999")),
    Type("timestamp(0)", "timestamp_ntz", ("2024-02-29 23:59:59.4",), ("infinity",)),
    Type("timestamptz", "timestamp",
         ("2024-02-29 23:59:59.999999+05:30", "0001-01-01 00:00+00", "1970-01-01 00:00+00",
          "9999-12-31 23:59:59.999999+00", "1969-12-31 23:59:59.9+00"),
         ("infinity", "-infinity", "0044-03-15 12:00:00.5+00 BC", "4713-01-01 00:00+00 BC",
          "0001-12-31 23:59:59.999999+00 BC", "10000-01-01 00:00+00",
          "294276-12-31 23:59:59.999999+00")),
    Type("time", "string", ("00:00", "24:00:00", "12:34:56.789", "23:59:59.999999")),
    Type("timetz", "string", ("12:34:56.789+05:30", "24:00:00+15:59", "00:00-15:59:59")),
    Type("interval", "string", ("0", "1 year 2 mons -3 days 04:05:06.7", "-1 day",
                                "178000000 years", "-00:00:00.000001")),
    Type("interval day to second(3)", "string", ("1 day 02:03:04.5678",)),
    Type("uuid", "string", ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "0" * 32)),
    Type("json", "string", (JSON, "null", ' "\\u0041"\n', "1e1000")),
    Type("jsonb", "string", (JSON, "null", '"\\u0041"', "1e100")),
    Type("jsonpath", "string", ("$.a[*] ? (@ > 1)", 'strict $."x y"')),
    Type("xml", "string", ("<a>é</a>", '<?xml version="1.0" encoding="UTF-8"?><a b="1"/>',
                           '<?xml version="1.1" standalone="yes"?><a/>', "text &amp; <b/>", "")),
    Type("bit(3)", "string", ("101", "000")),
    Type("varbit", "string", ("", "1", "0" * 100)),
    Type("varbit(5)", "string", ("10101",)),
    Type("inet", "string", ("10.0.0.1", "10.0.0.1/24", "::1", "::ffff:1.2.3.4/100", "0.0.0.0/0")),
    Type("cidr", "string", ("10.0.0.0/8", "10.0.0.1/32", "::/0")),
    Type("macaddr", "string", ("08:00:2b:01:02:03",)),
    Type("macaddr8", "string", ("08:00:2b:01:02:03:04:05",)),
    Type("point", "string", ("(1,0.1)", "(NaN,-Infinity)")),
    Type("line", "string", ("{1,-1,0.5}",)),
    Type("lseg", "string", ("[(1,2),(3,4.5)]",)),
    Type("box", "string", ("(3,4),(1,2)", "(1e300,5e-324),(-0,0)"), elements="string"),
    Type("path", "string", ("((1,2),(3,4))", "[(1,2),(3,4),(5,6)]")),
    Type("polygon", "string", ("((1,2),(3,4),(5,6))",)),
    Type("circle", "string", ("<(1,2),0.5>",)),
    Type("tsvector", "string", ("'a':1 'b''c':2A,3", "", "'\\\\':1 'x y'")),
    Type("tsquery", "string", ("'a' & !('b' | 'c d') <2> 'e':*A", "")),
    Type("pg_lsn", "string", ("16/B374D848", "0/0", "FFFFFFFF/FFFFFFFF")),
    Type("pg_snapshot", "string", ("10:20:10,14,15", "1:1:")),
    Type("txid_snapshot", "string", ("10:20:10,14,15",)),
    Type("xid", "string", ("0", "4294967295")),
    Type("xid8", "string", ("0", "18446744073709551615")),
    Type("cid", "string", ("4294967295",)),
    Type("tid", "string", ("(4294967295,65535)",)),
    Type("int2vector", "string", ("", "1 -2 3")),
    Type("oidvector", "string", ("", "1 4294967295")),
    Type("aclitem", "string", ("postgres=arwdDxt/postgres", "=r/postgres")),
    Type("refcursor", "string", ("", 'a "cursor"')),
    Type("regclass", "string", ("pg_class", '"Other Schema"."odd ""table"""', "0", "987654321")),
    Type("regtype", "string", ("int4", "timestamp with time zone", '"Other Schema".mood', "0")),
    Type("regproc", "string", ("pg_backend_pid", '"Other Schema"."f,g"', "0")),
    Type("regprocedure", "string", ("upper(text)", '"Other Schema"."f,g"(int)')),
    Type("regoper", "string", ("||/", "0")),
    Type("regoperator", "string", ("+(int4,int4)", "!!(NONE,tsquery)")),
    Type("regrole", "string", ("postgres",)),
    Type("regnamespace", "string", ("pg_catalog", '"Other Schema"')),
    Type("regconfig", "string", ("english",)),
    Type("regdictionary", "string", ("simple",)),
    Type("regcollation", "string", ('"C"', "987654321")),
    Type("int4range", "string", ("empty", "[1,5)", "(,)", "[-2147483648,2147483647)")),
    Type("int8range", "string", ("[1,9223372036854775807)", "(,1)")),
    Type("numrange", "string", ("[1.50,1e30]", "(NaN,)", "[-Infinity,Infinity)")),
    Type("tsrange", "string", ('["2024-01-01 00:00:00",infinity)', "empty", '(,"0044-03-15 BC"]')),
    Type("tstzrange", "string", ('["2024-01-01 00:00:00+05:30",)', "empty")),
    Type("daterange", "string", ("[2024-01-01,infinity)", "[-infinity,10000-01-01)")),
    Type("int4multirange", "string", ("{}", "{[1,2),[5,9)}"), since=14),
    Type("int8multirange", "string", ("{(,)}",), since=14),
    Type("nummultirange", "string", ("{[1.50,2],(3,)}",), since=14),
    Type("tsmultirange", "string", ('{["2024-01-01 00:00:00",infinity)}',), since=14),
    Type("tstzmultirange", "string", ('{["2024-01-01 00:00:00+00",)}',), since=14),
    Type("datemultirange", "string", ("{[2024-01-01,2024-02-01),[2025-01-01,)}",), since=14),
    # Only values that the server itself computes
    Type("pg_node_tree", "string", (Sql("SELECT adbin FROM pg_attrdef LIMIT 1"),), elements=""),
    Type("pg_ndistinct", "string", (_statistic("stxdndistinct"),), elements=""),
    Type("pg_dependencies", "string", (_statistic("stxddependencies"),), elements=""),
    Type("pg_mcv_list", "string", (_statistic("stxdmcv"),), elements=""),
    # No values in a table's rows
    Type("gtsvector", "string"),
    Type("pg_brin_bloom_summary", "string", elements="", since=14),
    Type("pg_brin_minmax_multi_summary", "string", elements="", since=14),
    # Domains
    Type("information_schema.cardinal_number", "integer", ("0", "2147483647")),
    Type("information_schema.character_data", "string", ("", "x y")),
    Type("information_schema.sql_identifier", "string", ("", "x y")),
    Type("information_schema.time_stamp", "timestamp", ("2024-02-29 23:59:59.99+00",),
         ("infinity",)),
    Type("information_schema.yes_or_no", "string", ("YES", "NO")),
)
# fmt: on

"""Types that users and extensions create, as `tests.harness.types` for built-in ones."""

from __future__ import annotations

from tests.harness.types import Type

PAIRS = ("(1,)", "(,)", '(2,"x y")', '(3,"a""b\\\\c,(d)")', '(4,"")')

# fmt: off
USER_DEFINED: tuple[Type, ...] = (
    Type("mood", "string", ("sad", "so so", "NULL", "a,b")),
    Type('"Other Schema".mood', "string", ("dolorous", "")),
    Type("quantity", "integer", ("0", "2147483647")),
    Type("price", "decimal(10,2)", ("0", "-0.01", "99999999.99"), ("NaN",)),
    Type("price_again", "decimal(10,2)", ("0.5",), ("NaN",)),
    Type("code", "string", ("", "ab")),
    Type("due", "date", ("2024-02-29",), ("infinity",)),
    Type("tags", "array<string>", ("{}", '{"",NULL,"NULL","a,b"}'), ("{{a},{b}}", "[0:1]={a,b}")),
    Type("some_tags", "array<string>", ('{a,"b c"}',), ("{{a},{b}}",)),
    Type("prices", "array<decimal(6,2)>", ("{1.5,NULL}",), ("{NaN}",)),
    Type("pair", "string", PAIRS),
    Type("nest", "string", ('("(1,""x y"")","{1,NULL}",2024-02-29)', "(,,)",
                            '(,"{{1},{2}}",infinity)')),
    Type("filled_pair", "string", ("(1,x)",)),
    Type("parts", "string", ("(1,2024-02-29)",)),
    Type("wordrange", "string", ("empty", '["a b","c""d,"]', "(,z)")),
    Type("wordmultirange", "string", ('{[a,b),["x y",)}',), since=14),
    Type("opaque", "string", ("", "any text", "ü{}")),
    Type("semicolons", "string", ("", "a;b", "c,d"), elements="string"),
)
# fmt: on


def _base_type(name: str, delimiter: str) -> tuple[str, ...]:
    functions = "LANGUAGE internal IMMUTABLE STRICT"
    return (
        f"CREATE TYPE {name}",
        f"CREATE FUNCTION {name}_in(cstring) RETURNS {name} {functions} AS 'textin'",
        f"CREATE FUNCTION {name}_out({name}) RETURNS cstring {functions} AS 'textout'",
        f"""CREATE TYPE {name} (INPUT = {name}_in, OUTPUT = {name}_out, LIKE = text,
            DELIMITER = '{delimiter}')""",
    )


SETUP = (
    'CREATE SCHEMA "Other Schema"',
    'CREATE TABLE "Other Schema"."odd ""table""" (id int PRIMARY KEY)',
    """CREATE FUNCTION "Other Schema"."f,g"(int) RETURNS int LANGUAGE sql AS 'SELECT 1'""",
    "CREATE TYPE mood AS ENUM ('sad', 'so so', 'NULL', 'a,b')",
    """CREATE TYPE "Other Schema".mood AS ENUM ('dolorous', '')""",
    "CREATE DOMAIN quantity AS int CHECK (value >= 0)",
    "CREATE DOMAIN price AS numeric(10,2)",
    "CREATE DOMAIN price_again AS price CHECK (value > -1000)",
    "CREATE DOMAIN code AS char(4)",
    "CREATE DOMAIN due AS date",
    "CREATE DOMAIN tags AS text[]",
    "CREATE DOMAIN some_tags AS tags",
    "CREATE DOMAIN prices AS numeric(6,2)[]",
    "CREATE TYPE pair AS (a int, b text)",
    "CREATE TYPE nest AS (p pair, ints int[], day date)",
    "CREATE DOMAIN filled_pair AS pair CHECK ((value).a > 0)",
    "CREATE TYPE wordrange AS RANGE (subtype = text)",
    # base types whose OIDs are unknown; the second separates array elements by semicolons
    *_base_type("opaque", ","),
    *_base_type("semicolons", ";"),
    # a row type, statistics and a default, from which to read the server's own values
    "CREATE TABLE parts (a int DEFAULT 1 + 1, d date)",
    "INSERT INTO parts SELECT i % 3, '2024-01-01'::date + i % 3 FROM generate_series(1, 90) i",
    "CREATE STATISTICS part_statistics ON a, d FROM parts",
    "ANALYZE parts",
)

# fmt: off
EXTENSIONS: dict[str, tuple[Type, ...]] = {
    "citext": (Type("citext", "string", ("", "Ab", "ß")),),
    "hstore": (Type("hstore", "string", ("", "a=>1, b=>NULL", '"x y"=>"q\\"r"')),
               Type("ghstore", "string")),
    "ltree": (Type("ltree", "string", ("", "Top.Science")),
              Type("lquery", "string", ("Top.*{1,2}.x@",)),
              Type("ltxtquery", "string", ("Europe & !Russia*",)),
              Type("ltree_gist", "string")),
    "cube": (Type("cube", "string", ("(1, 2),(3, 4)", "(0.1)")),),
    "earthdistance": (Type("earth", "string", ("(6378168, 0, 0)",)),),
    "pg_trgm": (Type("gtrgm", "string"),),
    "seg": (Type("seg", "string", ("1.50 .. 2", "~3", "<4")),),
    "isn": tuple(Type(name, "string", (value,)) for name, value in {
        "ean13": "9780393040029", "isbn13": "978-0-393-04002-9", "ismn13": "979-0-2600-0043-8",
        "issn13": "977-1436-452-00-8", "isbn": "0-393-04002-X", "ismn": "M-2600-0043-8",
        "issn": "1436-4522", "upc": "220356483481"}.items()),
    "lo": (Type("lo", "long", ("0", "4294967295")),),
    "intarray": (Type("query_int", "string", ("1 & (2 | !3)",)),
                 Type("intbig_gkey", "string")),
    "vector": (Type("vector", "string", ("[1,2.5,-0.1]",)),
               Type("vector(3)", "string", ("[1,2.5,-0.1]",)),
               Type("halfvec", "string", ("[1,2.5,65504]",)),
               Type("sparsevec", "string", ("{1:1.5,5:-2}/5",))),
}
# fmt: on
"""Types of extensions that a server may have, by extension, after those that it requires."""

"""Which types and functions may be evaluated: those of superusers, and of this role.

Whatever another role defines would run with this role's privileges. An object's owner is not
enough: another owner of a type changes nothing of what depends on it. Its casts, the functions of
its ranges and those of a domain's checks keep their owners, who may replace them.
"""

from __future__ import annotations

from typing import LiteralString

from ingestd.postgres.catalog.user_types import EACH_PART, FIRST_USER_OID

_END = ") AS x(oid, how)"
_CHECKED = """UNION ALL
    SELECT d.refobjid, 'check' FROM pg_catalog.pg_constraint k
      JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_constraint'::pg_catalog.regclass
       AND d.objid = k.oid AND d.refclassid = 'pg_catalog.pg_type'::pg_catalog.regclass
     WHERE t.typtype = 'd' AND k.contypid = t.oid
    """
EACH_TRUSTED_PART: LiteralString = EACH_PART.replace(_END, _CHECKED + _END)
"""As `EACH_PART`, and the types that a domain's checks refer to."""


def is_trusted(owner: LiteralString) -> LiteralString:
    """Return the SQL condition that an object is owned by a superuser or by this role."""
    return f"""EXISTS (SELECT FROM pg_catalog.pg_roles r
                 WHERE r.oid = {owner} AND (r.rolsuper OR r.rolname = current_user))"""


def _untrusted(functions: LiteralString) -> LiteralString:
    return f"""EXISTS (SELECT FROM ({functions}) AS called(oid)
            JOIN pg_catalog.pg_proc p ON p.oid = called.oid
           WHERE called.oid >= {FIRST_USER_OID} AND NOT {is_trusted("p.proowner")})"""


def is_operator_trusted(o: LiteralString) -> LiteralString:
    """Return the SQL condition that an operator `o`, and what it calls, may be evaluated."""
    return f"""({is_trusted(f"{o}.oprowner")} AND NOT {_untrusted(_of_operator(o))})"""


def _of_operator(o: LiteralString) -> LiteralString:
    functions = f"{o}.oprcode, {o}.oprrest, {o}.oprjoin"
    return f"SELECT pg_catalog.unnest(ARRAY[{functions}]::pg_catalog.oid[])"


def untrusted_casts(t: LiteralString) -> LiteralString:
    """Return FROM and WHERE of the casts `k`, of another role's, that may be called for a type `t`.

    Those of its arrays and multirange, too. Those to and from types `s` of other roles are left
    out: they are called only if a query names that type, and any role may create them.
    """
    return f"""
      FROM pg_catalog.pg_cast k
      JOIN pg_catalog.pg_type f ON f.oid IN (k.castsource, k.casttarget)
      JOIN pg_catalog.pg_type s ON s.oid IN (k.castsource, k.casttarget)
       AND (s.oid <> f.oid OR k.castsource = k.casttarget)
     WHERE f.oid IN (SELECT pg_catalog.unnest(ARRAY[m.oid, m.typarray])
                       FROM pg_catalog.pg_type m
                      WHERE m.oid = {t}.oid OR m.oid IN (
                        SELECT g.rngmultitypid FROM pg_catalog.pg_range g
                         WHERE g.rngtypid = {t}.oid))
       AND {is_trusted("s.typowner")} AND {_untrusted("SELECT k.castfunc")}"""  # noqa: S608 - constants


def has_untrusted_functions(t: LiteralString) -> LiteralString:
    """Return the SQL condition that functions of a type `t`, other than casts, are not trusted.

    These are its input and output functions, those of its range, of its domain's checks, and of
    the operators and classes that are found by its type.
    """
    return _untrusted(f"""
             SELECT pg_catalog.unnest(ARRAY[{t}.typinput, {t}.typoutput, {t}.typreceive,
               {t}.typsend, {t}.typmodin, {t}.typmodout, {t}.typanalyze]::pg_catalog.oid[])
             UNION ALL
             SELECT pg_catalog.unnest(ARRAY[g.rngcanonical, g.rngsubdiff]::pg_catalog.oid[])
               FROM pg_catalog.pg_range g WHERE {t}.oid IN (g.rngtypid, g.rngmultitypid)
             UNION ALL
             SELECT a.amproc FROM pg_catalog.pg_amproc a
              WHERE a.amproc >= {FIRST_USER_OID}
                AND {t}.oid IN (a.amproclefttype, a.amprocrighttype)
             UNION ALL
             {_of_operator("o")}
               FROM pg_catalog.pg_amop a JOIN pg_catalog.pg_operator o ON o.oid = a.amopopr
              WHERE a.amopopr >= {FIRST_USER_OID}
                AND {t}.oid IN (a.amoplefttype, a.amoprighttype)
             UNION ALL
             SELECT f.oid
               FROM pg_catalog.pg_constraint n
               JOIN pg_catalog.pg_depend d
                 ON d.classid = 'pg_catalog.pg_constraint'::pg_catalog.regclass AND d.objid = n.oid
               LEFT JOIN pg_catalog.pg_operator o ON o.oid = d.refobjid
                AND d.refclassid = 'pg_catalog.pg_operator'::pg_catalog.regclass
              CROSS JOIN LATERAL (
                SELECT d.refobjid WHERE d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass
                UNION ALL {_of_operator("o")}) AS f(oid)
              WHERE n.contypid = {t}.oid AND {t}.typtype = 'd'""")  # noqa: S608 - constants


def is_type_trusted(t: LiteralString) -> LiteralString:
    """Return the SQL condition that a type `t`, and what is called for it, may be evaluated.

    Not what is called for its parts.
    """
    return f"""({is_trusted(f"{t}.typowner")} AND NOT {has_untrusted_functions(t)}
           AND NOT EXISTS (SELECT {untrusted_casts(t)}))"""

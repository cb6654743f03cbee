"""Every catalog query bounds what a table's owner makes large, and waits for no table's lock.

A query of the catalog covers all tables of a source: one table's owner must not be able to make its
answer too large for the daemon, or to keep it waiting (I8).
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.harness.source_code import READS_CODE, ROOT, modules, nodes, text_of

pytestmark = READS_CODE
UNBOUNDED = (
    "adbin",
    "attmissingval",
    "col_description",
    "conbin",
    "description",
    "enumlabel",
    "indexprs",
    "indpred",
    "obj_description",
    "partexprs",
    "pg_get_expr",
    "prosrc",
    "prqual",
    "relpartbound",
    "reloptions",
    "stxexprs",
    "tgqual",
    "typdefault",
)
"""Columns and functions of the catalog whose texts an object's owner makes as long as they like."""
LOCKING = (
    "pg_get_constraintdef",
    "pg_get_expr",
    "pg_get_indexdef",
    "pg_get_partkeydef",
    "pg_get_publication_tables",
    "pg_get_ruledef",
    "pg_get_statisticsobjdef",
    "pg_get_triggerdef",
    "pg_get_viewdef",
    "pg_indexes_size",
    "pg_partition_ancestors",
    "pg_partition_tree",
    "pg_publication_tables",
    "pg_relation_size",
    "pg_table_size",
    "pg_total_relation_size",
)
"""Functions that open the relation, and so wait for a session that has locked it."""
FOLDER = "ingestd/postgres"
MEANT_SIZES = {
    ("catalog/metadata.py", "obj_description"): "left(), one for each table",
    ("catalog/metadata.py", "col_description"): "left() and at_most()",
    ("catalog/planner_functions.py", "indexprs"): "at_most(); it is one table's",
    ("catalog/planner_functions.py", "indpred"): "at_most()",
    ("catalog/planner_functions.py", "stxexprs"): "at_most()",
    ("catalog/planner_functions.py", "partexprs"): "at_most()",
    ("catalog/published_filters.py", "pg_get_expr"): "at_most()",
    ("catalog/published_filters.py", "prqual"): "at_most()",
    ("catalog/publication.py", "prqual"): "its md5()",
    ("catalog/tables.py", "attmissingval"): "at_most()",
    ("catalog/tables.py", "description"): "left() and at_most()",
    ("catalog/user_types.py", "enumlabel"): "find_large() comes first",
    ("rewrites/ddl_script.py", "obj_description"): "left(), of one schema",
    ("rewrites/ddl_script.py", "prosrc"): "left(), of one schema's functions",
}
MEANT_LOCKS = {
    ("catalog/metadata.py", "pg_table_size"): "not of the tables in pg_locks; its own time limit",
    ("catalog/partitions.py", "pg_relation_size"): "of one table, which is about to be read",
    ("catalog/partitions.py", "pg_table_size"): "the same",
    (
        "catalog/planner_functions.py",
        "pg_partition_ancestors",
    ): "reads pg_inherits, locks no parent",
    ("catalog/published_filters.py", "pg_get_expr"): "one by one if a table is locked",
    ("catalog/replica_identity.py", "pg_partition_tree"): "in a remedy",
    (
        "rewrites/fingerprint_queries.py",
        "pg_relation_size",
    ): "of one table: own_lock(), read_empty()",
    ("snapshot/queries.py", "pg_relation_size"): "of one table, which is locked already",
}


def sql_texts() -> list[tuple[str, str]]:
    """Return the texts of all modules that are SQL or a part of it, without docstrings."""
    found = []
    for path in modules(FOLDER):
        found_nodes = nodes(text_of(path))
        statements = [node for node in found_nodes if isinstance(node, ast.Expr)]
        prose = {id(node.value) for node in statements if isinstance(node.value, ast.Constant)}
        found += [
            (path.relative_to(ROOT / FOLDER).as_posix(), node.value)
            for node in found_nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if id(node) not in prose
        ]
    return found


def uses_of(words: tuple[str, ...], text: str) -> list[str]:
    """Return which of these names a query uses, other than to find out whether they are null."""
    compared = re.sub(r"\w+(\.\w+)? IS (NOT )?NULL", "", text)
    return [word for word in words if re.search(rf"\b{word}\b", compared)]


@pytest.mark.parametrize(
    ("words", "meant"), [(UNBOUNDED, MEANT_SIZES), (LOCKING, MEANT_LOCKS)], ids=["sizes", "locks"]
)
@pytest.mark.attack("table owner")
def test_each_catalog_query_is_bounded(
    words: tuple[str, ...], meant: dict[tuple[str, str], str]
) -> None:
    found = {(module, word) for module, text in sql_texts() for word in uses_of(words, text)}
    assert found == meant.keys()


def test_uses_are_seen() -> None:
    assert uses_of(UNBOUNDED, "SELECT i.indexprs::text FROM pg_index i") == ["indexprs"]
    assert uses_of(LOCKING, "SELECT pg_catalog.pg_get_expr(a, b)") == ["pg_get_expr"]
    assert uses_of(UNBOUNDED, "SELECT 1 FROM pg_index i WHERE i.indpred IS NOT NULL") == []

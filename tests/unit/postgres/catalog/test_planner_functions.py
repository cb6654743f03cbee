"""Which nodes of an index's expression may run the code of others when a query is planned."""

from __future__ import annotations

import pytest

from ingestd.postgres.catalog.planner_functions import _parsed

VAR = "{VAR :varno 1 :varattno 1 :vartype 20000 :vartypmod -1 :location 7}"


@pytest.mark.parametrize(
    ("text", "may_run"),
    [
        (VAR, False),
        (f"({{RELABELTYPE :arg {VAR} :resulttype 20000}})", False),
        ("{CONST :consttype 20000 :constvalue 4 [ 1 0 0 0 ]}", False),
        (f"({{XMLEXPR :op 7 :args ({VAR}) :type 25}})", False),
        (f"({{JSONEXPR :formatted_expr {VAR} :returning {{JSONRETURNING :typid 20000}}}})", True),
        (f"({{LATEREXPR :args ({VAR}) :resulttype 20000}})", True),
        ("({LATEREXPR :opnos (o 97 20000)})", True),
        ("({LATEREXPR :opnos (o 97 98)})", False),
    ],
)
def test_an_unknown_node_may_run_what_it_refers_to(text: str, *, may_run: bool) -> None:
    nodes = list(_parsed(None, text))
    assert any(node.may_run_code for node in nodes) == may_run


@pytest.mark.parametrize(("oid", "domain"), [(20000, 20000), (13000, 0)])
def test_a_cast_to_a_domain_makes_its_checks(oid: int, domain: int) -> None:
    *_, node = _parsed(None, f"({{COERCETODOMAIN :arg {VAR} :resulttype {oid} :resulttypmod -1}})")
    assert node.domain == domain


def test_the_depth_of_an_expression_is_not_limited() -> None:
    depth = 20_000
    call = "{FUNCEXPR :funcid 20000 :funcresulttype 23 :args ("
    nodes = list(_parsed(None, call * depth + VAR + ")}" * depth))
    assert len(nodes) == depth + 1
    assert all(node.varies for node in nodes)

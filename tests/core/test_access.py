import pytest

from agentd.core.access import Caller, Right, Role, roles_with

ALL = frozenset(Right)


@pytest.mark.parametrize(
    ("role", "rights"),
    [
        (Role.ADMIN, ALL),
        (Role.AGENT, {Right.LOOK, Right.OUTPUT, Right.KERNELS}),
        (Role.READ, {Right.LOOK}),
    ],
)
def test_roles_have_the_rights_of_the_table(role: Role, rights: set[Right]) -> None:
    caller = Caller("c", role)
    assert {right for right in Right if caller.may(right)} == rights


def test_a_caller_sees_its_agents_or_all() -> None:
    assert Caller("c", Role.ADMIN).sees("anything")
    mine = Caller("c", Role.AGENT, frozenset({"a"}))
    assert (mine.sees("a"), mine.sees("b"), mine.sees("")) == (True, False, False)


def test_refusal_names_roles_with_the_right() -> None:
    assert roles_with(Right.NODE) == ["admin"]
    assert roles_with(Right.OUTPUT) == ["admin", "agent"]

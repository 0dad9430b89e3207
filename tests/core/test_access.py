import pytest

from agentd.core.access import Caller, Right, Role, require_unreserved_id, roles_with
from agentd.errors import Forbidden

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
    assert {right for right in Right if caller.has_right(right)} == rights


def test_a_caller_sees_its_agents_or_all() -> None:
    assert Caller("c", Role.ADMIN).sees("anything")
    mine = Caller("c", Role.AGENT, frozenset({"a"}))
    assert (mine.sees("a"), mine.sees("b"), mine.sees("")) == (True, False, False)


def test_refusal_names_roles_with_the_right() -> None:
    assert roles_with(Right.NODE) == ["admin"]
    assert roles_with(Right.OUTPUT) == ["admin", "agent"]


@pytest.mark.parametrize("new_id", ["slurm-7", "slurm-", "k8s-00ff"])
def test_ids_of_engines_are_created_by_admins_alone(new_id: str) -> None:
    require_unreserved_id(Caller("c", Role.ADMIN), new_id)
    with pytest.raises(Forbidden, match=r'lacks the right "create ids that begin with \w+-"'):
        require_unreserved_id(Caller("c", Role.AGENT), new_id)


@pytest.mark.parametrize("new_id", [None, "slurm", "slurm7", "k8s", "my-slurm-7", "k-0011"])
def test_ids_without_a_prefix_are_for_all(new_id: str | None) -> None:
    require_unreserved_id(Caller("c", Role.AGENT), new_id)

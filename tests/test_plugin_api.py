"""Functions of the plugin API."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd import plugin_api
from agentd.core.partition.auto_split import split_units
from agentd.plugin_api import dealt_in_groups


def test_every_class_of_the_module_is_exported() -> None:
    own = [
        name
        for name, value in vars(plugin_api).items()
        if isinstance(value, type) and value.__module__ == plugin_api.__name__
    ]
    assert {name for name in own if not name.startswith("_")} <= set(plugin_api.__all__)


@pytest.mark.parametrize(
    ("groups", "agents", "expected"),
    [
        ("0 1 2 3", "ab", ["01", "23"]),
        ("03 12", "ab", ["03", "12"]),
        ("03 1 2", "ab", ["03", "12"]),
        # a pair goes where it fills the places, not where more are left
        ("034 12", "ab", ["034", "12"]),
        ("12 0 3 4", "ab", ["034", "12"]),
        # three do not fit: the agent with most is filled, and the third is alone
        ("012 3", "ab", ["01", "23"]),
        # five of six fill one of three agents, and the other three are a group again
        ("01234 5", "abc", ["01", "23", "45"]),
        ("012345", "a", ["012345"]),
        ("012 345", "ab", ["012", "345"]),
        ("0", "abc", ["0", "", ""]),
        ("", "ab", ["", ""]),
    ],
)
def test_groups_are_dealt_whole_where_they_fit(groups, agents, expected) -> None:
    dealt = dealt_in_groups(groups.split(), agents)
    assert ["".join(dealt[agent]) for agent in agents] == expected


def test_groups_are_dealt_to_some_agent() -> None:
    with pytest.raises(ValueError, match="cannot split 1 into 0"):
        dealt_in_groups(["0"], [])


@given(
    st.lists(st.integers(0, 5), max_size=20),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_groups_are_dealt_equally_in_any_order(group_of, parts, random) -> None:
    agents = [f"agent{n}" for n in range(parts)]
    groups: dict[int, list[str]] = {}
    for number, group in enumerate(group_of):
        groups.setdefault(group, []).append(f"d{number}")
    dealt = dealt_in_groups(groups.values(), agents)
    assert [len(dealt[agent]) for agent in agents] == split_units(len(group_of), parts)
    assert sorted(n for ids in dealt.values() for n in ids) == sorted(
        f"d{number}" for number in range(len(group_of))
    )
    mixed = [random.sample(ids, len(ids)) for ids in groups.values()]
    random.shuffle(mixed)
    assert dealt_in_groups(mixed, agents) == dealt

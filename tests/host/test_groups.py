"""Groups of a request: by number or name, allowed by number, beside those of devices."""

import dataclasses
from collections import defaultdict
from functools import partial
from threading import Event

import pytest
from msgspec.structs import replace

from agentd.core.kernel.edits import ContainerEdits
from agentd.core.kernel.options import parse_group
from agentd.error_codes import Scope
from agentd.errors import InvalidRequest, NotReady, RuntimeUnavailable
from agentd.host import groups
from agentd.host.groups import group_problems, resolve_groups, with_group_ids
from agentd.host.lookups import Lookups
from agentd.program.name_service import NameEntry
from contracts.test_runtime import plan

IDS = {"root": 0, "video": 44, "vid": 44, "docker": 999, "render": 105}


def entry(name: str) -> NameEntry | None:
    return NameEntry(name, IDS[name], 0) if name in IDS else None


@pytest.fixture(autouse=True)
def database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "find_entry", lambda _, name: entry(name))


@pytest.mark.parametrize(
    ("requested", "allowed", "ids"),
    [
        ([], [], []),
        ([2000, "video"], ["video", 2000], [2000, 44]),
        ([44], ["video"], [44]),
        (["video"], [44], [44]),
        (["vid"], ["video"], [44]),
        ([0], ["root"], [0]),
        (["video", 44], [44], [44, 44]),
        (["video"], ["no such group", "video"], [44]),
    ],
)
def test_allowed_groups_are_resolved(requested, allowed, ids: list[int]) -> None:
    assert resolve_groups(requested, allowed) == (ids, [])


@pytest.mark.parametrize(
    ("requested", "allowed", "lines"),
    [
        ([0], [], ["groups.0: group 0 is not allowed; allowed-groups: none"]),
        (["root"], ["video"], ["groups.0: group 'root' is not allowed; allowed-groups: video"]),
        (
            ["docker"],
            ["video", 2000],
            ["groups.0: group 'docker' is not allowed; allowed-groups: video, 2000"],
        ),
        (
            ["no such group", 44, 999],
            ["video"],
            [
                "groups.0: group 'no such group' is not allowed; allowed-groups: video",
                "groups.2: group 999 is not allowed; allowed-groups: video",
            ],
        ),
        (["vide"], ["video"], ["groups.0: group 'vide' is not allowed; allowed-groups: video"]),
        (
            ["\ud800"],
            ["video"],
            ["groups.0: group '\\ud800' is not allowed; allowed-groups: video"],
        ),
    ],
)
async def test_other_groups_are_refused_alike(requested, allowed, lines: list[str]) -> None:
    """Whether the host has such a group is not the caller's business."""
    assert [str(p) for p in await group_problems(requested, allowed, Lookups())] == lines
    with pytest.raises(InvalidRequest):
        await with_group_ids(plan("true"), requested, allowed, defaultdict(Lookups))


def test_no_name_is_looked_up_where_none_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of groups that is slow could be kept busy otherwise."""
    monkeypatch.setattr(groups, "find_entry", pytest.fail)
    assert [problem.where for problem in resolve_groups(["video", "docker"], [])[1]] == [
        *("groups.0", "groups.1")
    ]


@pytest.mark.parametrize("group", ["team-a", 2000])
def test_allowed_group_that_the_host_lacks_may_come(group: int | str) -> None:
    """Its number is not known before."""
    reason = "group 'team-a' of allowed-groups does not exist"
    with pytest.raises(NotReady, match=reason) as refused:
        resolve_groups([group], ["video", "team-a"])
    assert refused.value.scope is Scope.NODE, "another node may have it"


@pytest.mark.parametrize(
    ("of_devices", "requested", "groups"),
    [
        ((), [], ()),
        (("44", "105"), [], ("44", "105")),
        (("render", "no such group"), [], ("105", "no such group")),
        (("105",), [2000, "video", "render"], ("105", "2000", "44")),
    ],
)
async def test_groups_of_devices_come_first(of_devices, requested, groups) -> None:
    made = replace(plan("true"), edits=ContainerEdits(env={"A": "b"}, groups=of_devices))
    changed = await with_group_ids(made, requested, [2000, 44, 105], defaultdict(Lookups))
    assert changed == replace(made, edits=dataclasses.replace(made.edits, groups=groups))


async def test_groups_of_devices_wait_for_no_requested_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookups, answered = defaultdict[str, Lookups](partial(Lookups, max_threads=1)), Event()
    hang = {"docker": lambda name: answered.wait(20) and entry(name)}
    monkeypatch.setattr(groups, "find_entry", lambda _, name: hang.get(name, entry)(name))
    made = replace(plan("true"), edits=ContainerEdits(groups=("render",)))
    with monkeypatch.context() as patch:
        patch.setattr("agentd.host.lookups.ANSWER_TIMEOUT_S", 0.05)
        with pytest.raises(RuntimeUnavailable, match="the group database does not answer"):
            await with_group_ids(plan("true"), ["docker"], ["docker"], lookups)
    with pytest.raises(RuntimeUnavailable, match="do not answer: the group database"):
        await with_group_ids(made, ["docker"], ["docker"], lookups)
    assert (await with_group_ids(made, [], [], lookups)).edits.groups == ("105",)
    answered.set()


@pytest.mark.parametrize(
    ("raw", "group"),
    [
        *((0, 0), (2000, 2000), ("2000", 2000), ("video", "video"), ("domain users",) * 2),
        *((2**31 - 1, 2**31 - 1), ("007", 7), ("-1", "-1")),
    ],
)
def test_name_of_digits_is_a_number(raw: object, group: int | str) -> None:
    assert parse_group(raw) == group


@pytest.mark.parametrize(
    "raw", [-1, 2**31, "2147483648", "9" * 5000, "0" * 11, True, 1.0, None, "", "a\0", "x" * 257]
)
def test_other_values_are_no_groups(raw: object) -> None:
    with pytest.raises(ValueError, match="expected the name of a group, or its number from 0"):
        parse_group(raw)

import asyncio
from collections.abc import Sequence

import pytest
from importlib_metadata import EntryPoint

from adapters import zoo
from agentd.adapters.plugins import PluginHost, installed
from agentd.config.plugins import PluginTable
from agentd.core.allocation import Allocation, Share
from agentd.core.devices import DeviceId
from agentd.core.slots import ONE, SlotKind
from agentd.errors import PluginUnavailable
from agentd.plugin_api import ContainerEdits, Features
from agentd.services.interfaces import PluginState


def point(name: str, target: str) -> EntryPoint:
    return EntryPoint(name, f"adapters.zoo:{target}", "agentd.accelerators")


def host(tables: Sequence[PluginTable] = (), allow=(), block=(), **points: str) -> PluginHost:
    entry_points = {name: point(name, target) for name, target in points.items()}
    features = Features("process")
    return PluginHost(tables, allow, block, features=features, points=entry_points)


async def opened(made: PluginHost, timeout_s: float = 5) -> dict[str, tuple[PluginState, str]]:
    await made.load(timeout_s)
    await made.open(timeout_s)
    return {status.name: (status.state, status.reason) for status in made.statuses()}


async def test_an_installed_plugin_loads_by_itself_under_its_own_name() -> None:
    made = host(good=("Good"), table_only="NeedsTable")
    assert await opened(made) == {"good": (PluginState.READY, "")}
    (listing,) = made.listings()
    assert [slot.name for slot in listing.slot_types] == ["good.device"]
    assert listing.devices[0].device_id == ("good", "good0")


async def test_one_entry_point_serves_several_tables_and_a_table_replaces_automatic_loading():
    tables = [
        PluginTable(name="cuda", plugin="good", settings={"speed": 1}),
        PluginTable(name="good", plugin="good"),
    ]
    made = host(tables, good="Good")
    assert set(await opened(made)) == {"cuda", "good"}
    assert [listing.name for listing in made.listings()] == ["cuda", "good"]


@pytest.mark.parametrize(("allow", "block"), [(("a",), ()), ((), ("b",))])
async def test_allow_and_block_hold_entry_point_names(allow, block) -> None:
    tables = [PluginTable(name="x", plugin="b")]
    states = await opened(host(tables, allow, block, a="Good", b="Good"))
    assert states["a"][0] is PluginState.READY
    assert states["x"][0] is PluginState.BLOCKED
    assert "b" not in states


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("Missing", "import: AttributeError"),
        ("NotAPlugin", "is no AcceleratorPlugin"),
        ("OldApi", "speaks plugin API 0; this agentd speaks 1"),
        ("RaisesAtOpen", "open: RuntimeError: no driver here"),
        ("ExitsAtOpen", "open: SystemExit: 3"),
        ("StopsIteration", "open: StopIteration"),
        ("RaisesAtList", "list: OSError: device lost"),
        ("OutsidePrefix", "its slot 'cpu' is outside its prefix 'bad'"),
        ("NegativeAmount", "the capacity of d0: '-1' is negative"),
        ("NanAmount", "not finite"),
        ("HugeAmount", "too large"),
        ("OddId", "its id 'a/b c' is none"),
        ("UnknownSlot", "offers 'x.y', which is no slot type of it"),
        ("BadHealth", "the health of d0 is 'so-so'"),
        ("Twice", "it lists the id bad0 twice"),
        ("OddParent", "its parent: [5] where text belongs"),
        ("OddAliases", "its aliases: 'GPU' where text belongs"),
        ("OddNode", "the NUMA node of d0 is -1"),
        ("OddEdits", "its variables: [1, 2] where text belongs"),
        ("ListsNonsense", "it lists 'cuda0' where DeviceInfo belongs"),
    ],
)
async def test_a_plugin_that_misbehaves_is_reported_and_left_out(target: str, why: str) -> None:
    made = host(good="Good", bad=target)
    states = await opened(made)
    assert states["good"][0] is PluginState.READY
    assert states["bad"][0] is PluginState.FAILED
    assert why in states["bad"][1]
    assert [listing.name for listing in made.listings()] == ["good"]


async def test_a_plugin_that_is_not_installed_is_named_with_the_nearest() -> None:
    states = await opened(host([PluginTable(name="x", plugin="goood")], good="Good"))
    assert "did you mean good? installed: good" in states["x"][1]


async def test_wrong_settings_are_listed_with_their_place() -> None:
    tables = [PluginTable(name="cuda", plugin="good", settings={"sped": 1, "x": 2})]
    made = host(tables, good="Good")
    await made.load(5)
    problems = made.problems()
    assert [problem.where for problem in problems] == ["plugins.cuda.sped", "plugins.cuda.x"]


@pytest.mark.parametrize("target", ["Late", "ListsSlowly", "MadeSlowly"])
async def test_readiness_does_not_wait_for_a_late_plugin_and_it_joins_when_it_opens(
    target: str,
) -> None:
    zoo.release.clear()
    made = host(late=target, good="Good")
    states = await opened(made, 0.2)
    assert states["late"] == (PluginState.PENDING, "has not opened within 0.2 s")
    assert states["good"][0] is PluginState.READY
    joining = made.late()
    zoo.release.set()
    async with asyncio.timeout(5):
        assert await anext(joining) == "late"
    assert {listing.name for listing in made.listings()} == {"late", "good"}


async def test_a_required_plugin_that_failed_is_reported_as_such() -> None:
    made = host([PluginTable(name="bad", plugin="bad", required=True)], bad="RaisesAtOpen")
    await opened(made)
    assert made.failed_required() == [
        "plugin bad is required and failed: open: RuntimeError: no driver here"
    ]


def given(*names: str) -> tuple[Allocation, dict[DeviceId, str]]:
    shares = [
        Share(DeviceId(name, f"{name}0"), f"{name}.device", SlotKind.COUNT, ONE) for name in names
    ]
    return Allocation(tuple(shares)), {share.device_id: "S" for share in shares}


async def test_edits_give_what_was_allocated_and_hide_all_else() -> None:
    made = host(one="Good", two="Good")
    await opened(made)
    assert (await made.container_edits(*given("one"))).env == {"ONE": "one0", "TWO": ""}
    assert (await made.container_edits(*given())).env == {"ONE": "", "TWO": ""}


async def test_edits_that_fail_are_the_plugin_s_fault_and_say_so(monkeypatch) -> None:
    made = host(one="Good", two="Good")
    await opened(made)

    def broken(*_: object) -> ContainerEdits:
        raise OSError("driver gone")

    monkeypatch.setattr(zoo.Good, "container_edits", broken)
    with pytest.raises(PluginUnavailable, match=r"plugin one .* driver gone"):
        await made.container_edits(*given("one"))
    assert (await made.container_edits(*given())).env == {"ONE": "", "TWO": ""}


def test_sim_is_installed_as_its_own_distribution() -> None:
    assert installed()["sim"].value == "agentd_sim:SimPlugin"

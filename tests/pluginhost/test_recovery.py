"""Plugins that cannot start: the rows of docs/plugins/plugin-states.md.

Each row is tried with a table of its own, loaded by itself, and as `required`, on a node on which a
kernel already holds the plugin's device and another kernel that of a healthy plugin.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from importlib_metadata import EntryPoint
from msgspec.structs import replace

from agentd.config.plugins import PluginTable
from agentd.core.allocation.ledger import Allocation
from agentd.core.kernel.adoption import resolve_devices
from agentd.core.partition.rules import AgentRule, AllocationMode, SplitRules
from agentd.core.slots import BUILT_IN, read_slots
from agentd.errors import Conflict, PluginUnavailable, UnknownPlugin, UnsupportedResource
from agentd.events import EventLog
from agentd.pluginhost import instance
from agentd.pluginhost.host import PluginHost
from agentd.services.devices import NodeDevices
from agentd.services.protocols import PluginState
from core.machines import GIB, cores, memory
from pluginhost.rig import Hosts, given, opened, point, states, until_ready
from support.fakes import FakeMemory
from support.waiting import until

PAGE = Path(__file__).parents[2] / "docs" / "plugins" / "plugin-states.md"


@dataclass(frozen=True)
class Row:
    """A situation, and what is promised in it: state, words of the reason, answer to a request."""

    name: str
    mood: str
    state: PluginState
    why: str
    answer: type[Exception] | None
    mends: bool


ROWS = (
    Row("no such hardware", "absent", PluginState.ABSENT, "none on the bus",
        UnsupportedResource, mends=False),
    Row("no driver yet, or its library raises", "raise", PluginState.PENDING,
        "the driver is not loaded", PluginUnavailable, mends=True),
    Row("it hangs beyond `open-timeout`", "hang", PluginState.PENDING, "not open within 3 s",
        PluginUnavailable, mends=False),
    Row("its process dies", "crash", PluginState.PENDING, "killed by SIGSEGV",
        PluginUnavailable, mends=True),
    Row("it breaks the contract", "lie", PluginState.FAILED, "duplicate id moody0",
        UnsupportedResource, mends=False),
    Row("invalid settings", "fine", PluginState.FAILED, "plugins.moody.wrong: unknown key",
        UnsupportedResource, mends=False),
    Row("it is blocked", "fine", PluginState.BLOCKED, "blocked by plugins.block",
        UnsupportedResource, mends=False),
    Row("it works", "fine", PluginState.READY, "", None, mends=False),
)  # fmt: skip


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets what the plugin does the next time that it is opened."""
    mood = tmp_path / "mood"
    monkeypatch.setenv("PLUGIN_MOOD", str(mood))
    return mood.write_text


def test_the_page_has_a_line_for_each_row() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    said = {cells[1].strip(): cells for line in lines if len(cells := line.split("|")) > 5}
    for row in ROWS:
        cells = said[row.name]
        assert f"`{row.state.value}`" in cells[2], row.name
        code = {UnsupportedResource: "422", PluginUnavailable: "503", None: "201"}[row.answer]
        assert code in cells[4], row.name


def ask(host: PluginHost, devices: NodeDevices, slot: str) -> None:
    """Read a request as the daemon would."""
    statuses = host.statuses()
    read_slots(
        {slot: 1},
        devices.inventory.slot_types,
        unavailable={s.name: s.reason for s in statuses if s.state is PluginState.PENDING},
        failed={s.name: s.reason for s in statuses if s.state is PluginState.FAILED},
        absent={s.name: s.reason for s in statuses if s.state is PluginState.ABSENT},
    ).accepted()


def discovered(host: PluginHost, remembered: FakeMemory) -> NodeDevices:
    rules = SplitRules(AllocationMode.SHARED, (AgentRule("a"),))
    machine = [*cores(2), memory(8 * GIB)]
    devices = NodeDevices(host, remembered, rules, BUILT_IN, machine, EventLog())
    devices.discover()
    return devices


CASES = [
    pytest.param(row, loaded, id=f"{row.name}-{loaded}")
    for row, loaded in product(ROWS, ("by table", "by itself", "required"))
    if row.name != "invalid settings" or loaded != "by itself"
]


@pytest.mark.parametrize(("row", "loaded"), CASES)
async def test_row(host: Hosts, say: Callable[[str], None], row: Row, loaded: str) -> None:
    remembered = FakeMemory()
    say("fine")
    before = host(moody="Moody", good="Good")
    await opened(before)
    discovered(before, remembered)
    await before.close()

    say(row.mood)
    settings = {"wrong": 1} if row.name == "invalid settings" else {}
    is_required = loaded == "required"
    table = PluginTable(name="moody", plugin="moody", required=is_required, settings=settings)
    made = host(
        [] if loaded == "by itself" else [table],
        block=["moody"] if row.state is PluginState.BLOCKED else [],
        moody="Moody",
        good="Good",
    )
    seen = await opened(made, 3 if row.mood == "hang" else 20)
    if row.state is PluginState.BLOCKED and loaded == "by itself":
        assert "moody" not in seen
    else:
        assert seen["moody"][0] is row.state
        assert row.why in seen["moody"][1]
    assert bool(made.required_failures()) is (is_required and row.state is not PluginState.READY)

    devices = discovered(made, remembered)
    ask(made, devices, "good.device")
    if row.answer is None:
        ask(made, devices, "moody.device")
    else:
        with pytest.raises(row.answer):
            ask(made, devices, "moody.device")

    for name in ("moody", "good"):
        share = replace(given(name).shares[0], stable_id=f"S-{name}")
        held, missing = resolve_devices(Allocation((share,)), devices.inventory)
        assert (held.shares, missing) == ((share,), ())
    there = devices.find("moody", "moody0")
    assert there.gone is (row.state is not PluginState.READY)

    if row.mends:
        say("fine")
        await until_ready(made, "moody")
        devices.refresh("moody")
        ask(made, devices, "moody.device")
        assert not devices.find("moody", "moody0").gone


async def test_an_operator_can_have_any_of_them_tried_again_at_once(
    host: Hosts, say: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "MIN_BACKOFF_S", 1000.0)
    for mood in ("raise", "crash", "absent", "lie"):
        say(mood)
        made = host(moody="Moody")
        await opened(made)
        still = await made.retry("moody")
        assert still.state is not PluginState.READY
        say("fine")
        assert (await made.retry("moody")).state is PluginState.READY
        assert (await made.retry("moody")).state is PluginState.READY
        await made.close()


async def test_retry_waits_for_a_new_attempt(
    host: Hosts, say: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is mended while an earlier try is still on its way to fail."""
    monkeypatch.setattr(instance, "MIN_BACKOFF_S", 1000.0)
    say("slow")
    made = host(moody="Moody")
    opening = asyncio.create_task(opened(made))
    plugin = made._instances["moody"]
    await until(lambda: plugin._process is not None, within_s=10)
    retrying = asyncio.create_task(made.retry("moody"))
    await asyncio.sleep(0)  # it was asked for before the driver is mended
    say("fine")
    await opening
    assert (await retrying).state is PluginState.READY


async def test_blocked_plugin_cannot_be_retried(host: Hosts) -> None:
    made = host([PluginTable(name="x", plugin="nothing")], block=["good"], good="Good")
    await opened(made)
    with pytest.raises(Conflict, match="plugin x is blocked: no entry point 'nothing'"):
        await made.retry("x")
    with pytest.raises(UnknownPlugin, match="unknown plugin 'y' \\(this node has: x\\)"):
        await made.retry("y")


def test_the_pauses_grow_from_a_second_to_a_minute() -> None:
    assert (instance.MIN_BACKOFF_S, instance.MAX_BACKOFF_S) == (1.0, 60.0)
    page = " ".join(PAGE.read_text().split())
    assert re.search(r"after 1 s, 2 s, 4 s and so on, up to 60 s", page)


def claimed(name: str, target: str, owner: str) -> EntryPoint:
    found = point(name, target)
    vars(found)["dist"] = SimpleNamespace(name=owner)
    return found


async def test_entry_point_of_two_distributions_is_not_loaded(host: Hosts) -> None:
    points = [claimed("cuda", "Good", "ours"), claimed("cuda", "Twice", "theirs")]
    why = "entry point 'cuda' is claimed by ours and theirs; uninstall one of them"
    made = host(points=points)
    assert await opened(made) == {"cuda": (PluginState.FAILED, why)}
    assert made.problems() == []
    made = host([PluginTable(name="gpu", plugin="cuda")], points=points)
    seen = await opened(made)
    assert seen["gpu"] == (PluginState.FAILED, why)
    assert [(p.where, p.why) for p in made.problems()] == [("plugins.gpu.plugin", why)]


@pytest.mark.parametrize("name", ["cpu", "mem"])
async def test_entry_point_with_a_built_in_name_is_not_loaded(host: Hosts, name: str) -> None:
    made = host(points=[point(name, "Good"), point("good", "Good")])
    seen = await opened(made)
    state, why = seen[f"{name} (entry point)"]
    assert state is PluginState.FAILED
    assert why == f"invalid entry point name {name}: these devices are built in"
    assert [listing.name for listing in made.listings()] == ["good"]
    discovered(made, FakeMemory())


async def test_missing_entry_points_are_reported_together(host: Hosts) -> None:
    tables = [PluginTable(name="a", plugin="goood")]
    made = host(tables, allow=["good", "gud"], block=["cdua"], good="Good")
    assert [missing.where for missing in made.missing_entry_points()] == [
        "plugins.a.plugin", "plugins.allow", "plugins.block",
    ]  # fmt: skip
    assert str(next(made.conditions())).endswith("did you mean good? installed: good")
    assert states(made)["good"] is PluginState.PENDING

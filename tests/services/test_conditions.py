"""The list of the node's conditions, as it changes: what is logged, published and visible."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from agentd.concurrency import silent_subjects
from agentd.core.access import Caller, Role
from agentd.core.claim.claim import Claim, NameHolder
from agentd.core.conditions import ActiveCondition, Condition
from agentd.events import EventKind, EventLog
from agentd.rpc.rendering import status_line
from agentd.rpc.visibility import Visibility
from agentd.services.access import Access
from agentd.services.condition_sources import (
    agent_conditions,
    engine_conditions,
    excess_conditions,
    kernel_conditions,
    runtime_conditions,
)
from agentd.services.conditions import MAX_LOGGED_AT_ONCE, MAX_QUIET_S, QUIET_S, Conditions
from agentd.services.engines import AwaitedEngines
from agentd.services.protocols import Clock
from services.node import Rig
from support.waiting import until

LOST = Condition("device/cuda/cuda3", "cuda3 is unhealthy: GPU is lost", "reset it")


class Listed:
    """Conditions as a test sets them."""

    def __init__(self, rig: Rig | None = None) -> None:
        self.now = 1000.0
        self.found: list[Condition] = []
        self.looked_up: list[Condition] = []
        self.events = EventLog()
        clock = Clock(lambda: self.now, lambda: self.now, lambda: self.now)
        owners = Access(rig.node).owners if rig else lambda _: None
        self.conditions = Conditions(self.events, clock, owners)
        self.conditions.add(lambda: self.found)
        self.conditions.add_slow("this host", lambda: self.looked_up)

    @property
    def since(self) -> list[float]:
        return [item.since for item in self.conditions.current()]

    def report(self, *found: Condition, after_s: float = 0) -> list[str]:
        """Report these conditions, and return the log."""
        self.found, self.now = [*found], self.now + after_s
        with capture_logs() as logged:
            self.conditions.report()
        return [f"{line['log_level']} {line['event']} {line['about']}" for line in logged]


@pytest.fixture
def listed() -> Listed:
    return Listed()


async def test_condition_keeps_its_since_until_it_ends(listed: Listed) -> None:
    listed.found = [LOST, LOST, Condition(LOST.about, LOST.reason)]
    assert listed.since == [1000]
    listed.now, listed.found = 1009, [replace(LOST, remedy="replace it")]
    assert listed.since == [1000]
    listed.found = [replace(LOST, reason="cuda3 is gone")]
    assert listed.since == [1009]


async def test_begin_and_end_are_logged_and_published_once(listed: Listed) -> None:
    with listed.events.subscribe(None) as listener:
        began = listed.report(LOST)
        assert listed.report(LOST, after_s=60) == []
        ended = listed.report()
        listed.events.close()
        events = [(e.kind, e.value.condition) async for e in listener.follow(1)]
    assert began == ["warning condition.began device/cuda/cuda3"]
    assert ended == ["info condition.ended device/cuda/cuda3"]
    assert events == [(EventKind.CONDITION, LOST), (EventKind.CONDITION_REMOVED, LOST)]


@pytest.mark.parametrize("is_moving", [False, True], ids=["flapping", "counting"])
async def test_unsteady_condition_does_not_flood_the_log(listed: Listed, is_moving: bool) -> None:
    lines = []
    for second in range(0, 86400, 2):
        reason = f"{second} lines are lost" if is_moving else "the fan stops"
        found = [] if second % 4 and not is_moving else [Condition("log", reason)]
        lines += listed.report(*found, after_s=2)
    assert 20 < len(lines) < 100
    for _ in range(3):
        lines += listed.report(Condition("log", "0 lines are lost"), after_s=MAX_QUIET_S)
    assert lines[-1].startswith("warning condition.began")


async def test_condition_that_returns_for_good_is_logged_soon(listed: Listed) -> None:
    listed.report(LOST)
    listed.report()
    assert listed.report(LOST, after_s=QUIET_S / 2) == []
    assert listed.report(LOST, after_s=QUIET_S / 2) == ["warning condition.began device/cuda/cuda3"]


async def test_hundreds_of_conditions_are_logged_in_parts(listed: Listed) -> None:
    found = [Condition(f"device/cuda/cuda{n}", "GPU is lost") for n in range(500)]
    assert len(listed.conditions.current()) == 0
    assert len(listed.report(*found)) == MAX_LOGGED_AT_ONCE
    assert listed.conditions._changed.is_set()
    rest = [line for _ in range(20) for line in listed.report(*found)]
    assert len(rest) == 500 - MAX_LOGGED_AT_ONCE


async def test_an_event_is_followed_by_a_report(listed: Listed, monkeypatch) -> None:
    monkeypatch.setattr("agentd.services.conditions.MIN_PAUSE_S", 0.01)
    with capture_logs() as logged:
        task = asyncio.create_task(listed.conditions.run())
        await asyncio.sleep(0.05)
        listed.found = [LOST]
        listed.events.publish(EventKind.DEVICE, None)
        await until(lambda: len(logged), 1, within_s=5)
        task.cancel()
    assert logged[0]["remedy"] == "reset it"


async def test_lookup_that_hangs_is_a_condition_and_delays_no_other(
    listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentd.services.conditions.SOURCE_TIMEOUT_S", 0.05)
    answer = threading.Event()

    def wait() -> list[Condition]:
        answer.wait()
        return []

    listed.conditions.add_slow("a folder", wait)
    for live_restore in (["no live-restore"], []):
        listed.looked_up = [Condition("host", reason) for reason in live_restore]
        await listed.conditions.refresh_lookups()
        hanging, *others = [item.condition for item in listed.conditions.current()]
        assert (others, hanging.about) == (listed.looked_up, "host")
        assert "a folder" in hanging.reason
    answer.set()
    await until(lambda: len(silent_subjects()), 0, within_s=5)


@pytest.mark.parametrize("error", [RecursionError("too deep"), KeyError("x"), OSError("no disk")])
async def test_lookup_that_fails_ends_no_other(listed: Listed, error: Exception) -> None:
    def fail() -> list[Condition]:
        raise error

    listed.conditions.add_slow("a folder", fail)
    listed.looked_up = [LOST]
    await listed.conditions.refresh_lookups()
    found, failed = [item.condition for item in listed.conditions.current()]
    assert (found, failed.about, failed.agents) == (LOST, "host", ())
    assert str(error) in failed.reason


async def test_lookup_that_fails_ends_none_of_its_conditions(listed: Listed) -> None:
    """Conditions hold until the next answer, so they do not begin twice."""
    answers: list[Condition | Exception] = [LOST, OSError("no disk"), LOST]

    def ask() -> list[Condition]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [answer]

    listed.conditions.add_slow("a folder", ask)
    logged = []
    while answers:
        await listed.conditions.refresh_lookups()
        logged.append(listed.report(after_s=1))
    began, failed, ended = logged
    assert began == [f"warning condition.began {LOST.about}"]
    assert failed == ["warning condition.began host"]
    assert ended == ["info condition.ended host"]


TEAM = Caller("t", Role.AGENT, frozenset({"a"}))


@pytest.mark.parametrize(
    ("about", "reason", "is_visible"),
    [
        ("device/cuda/cuda0", "cuda0 is unhealthy: it coughs", True),
        ("device/cuda/cuda9", "cuda9 is gone", False),
        ("agent/a", "agent a has no core", True),
        ("agent/b", "agent b has no core", False),
        ("agent/removed", "agent removed was removed", False),
        ("kernel/mine", "kernel mine: unreadable", True),
        ("kernel/theirs", "kernel theirs: unreadable", False),
        ("kernel/unknown", "kernel unknown: unreadable", False),
        ("claim/c1", "claim c1: unreadable", False),
        ("plugin/cuda", "plugin cuda is failed", True),
        ("runtime/fake", "runtime fake is unavailable", True),
        ("engine/slurm", "engine slurm is not ready", True),
        ("state-dir", "devices.json cannot be written", True),
        ("log", "the log cannot be written", True),
        ("host", "the engine has no live-restore", True),
        ("host", "words that others choose (theirs, b) hide nothing", True),
    ],
)
async def test_agent_sees_conditions_about_its_own(
    rig: Rig, about: str, reason: str, is_visible: bool
) -> None:
    await rig.create("mine")
    await rig.create("theirs", "b")
    listed = Listed(rig)
    listed.found = [Condition(about, reason)]
    access = Access(rig.node)
    visible = access.visible_conditions(TEAM, listed.conditions.current())
    assert [item.condition for item in visible] == (listed.found if is_visible else [])
    everything = access.visible_conditions(Caller("r", Role.READ), listed.conditions.current())
    assert [item.condition for item in everything] == listed.found


@pytest.mark.parametrize(
    ("agents", "is_visible"),
    [(("a",), True), (("b",), False), (("a", "b"), False), (("",), False), ((), False)],
)
@pytest.mark.parametrize("about", ["host", "device/cuda/cuda0", "device/cuda/GPU-missing"])
async def test_condition_of_agents_is_for_who_sees_them(
    rig: Rig, about: str, agents: tuple[str, ...], is_visible: bool
) -> None:
    found = [ActiveCondition(Condition(about, "it is missing", agents=agents), 0.0, ("a", "b"))]
    access = Access(rig.node)
    assert access.visible_conditions(TEAM, found) == (found if is_visible else [])
    assert access.visible_conditions(Caller("r", Role.READ), found) == found


async def shown_to_team(rig: Rig, happens: Callable[[], Awaitable[object]], about: str) -> list:
    """Return the events about a condition that a team gets while something happens and after."""
    listed, visibility = Listed(rig), Visibility(rig.node, Access(rig.node))
    listed.report(Condition(about, "it coughs"))
    await happens()
    listed.report(Condition(about, "it coughs"))
    listed.report()
    events = [event for event in listed.events._past if visibility.visible_event(event, TEAM)]
    return [event.kind.value for event in events]


async def test_end_of_a_condition_is_for_who_saw_its_begin(rig: Rig) -> None:
    """A page that never hears of the end shows the condition until it is loaded again."""
    await rig.create("mine")
    await rig.create("theirs", "b")

    async def remove() -> None:
        await rig.service.remove("mine", 0)

    def deal(agent: str) -> Callable[[], Awaitable[None]]:
        async def deal_cuda0() -> None:
            split = rig.devices.split
            parts = {
                name: replace(part, devices=tuple(
                    d for d in part.devices if d.id != "cuda0" or name == agent))
                for name, part in split.partitions.items()
            }  # fmt: skip
            rig.devices._split = replace(split, partitions=parts)

        return deal_cuda0

    both = ["condition", "condition-removed"]
    assert await shown_to_team(rig, remove, "kernel/mine") == both
    assert await shown_to_team(rig, deal("a"), "device/cuda/cuda0") == [*both, *both]
    assert await shown_to_team(rig, deal("b"), "device/cuda/cuda0") == both
    assert await shown_to_team(rig, deal("b"), "device/cuda/cuda0") == []
    assert await shown_to_team(rig, deal("b"), "kernel/theirs") == []


async def test_runtime_conditions_are_outages_and_ignored_things(rig: Rig) -> None:
    assert [*runtime_conditions(rig.state)] == []
    rig.state.mark_unavailable("fake", "connection refused")
    reason = "runtime fake is unavailable: connection refused"
    remedy = "if it is gone for good: agentctl runtimes forget fake"
    assert [*runtime_conditions(rig.state)] == [Condition("runtime/fake", reason, remedy)]
    rig.state.mark_available("fake", reason="no answer to GET /info")
    reason = "runtime fake creates no kernels: no answer to GET /info"
    assert [*runtime_conditions(rig.state)] == [Condition("runtime/fake", reason)]
    rig.state.mark_available("fake", ("container x is ignored",))
    ignored = Condition("runtime/fake", "container x is ignored")
    assert [*runtime_conditions(rig.state)] == [ignored]


async def test_kernel_with_a_reason_is_a_condition_while_it_lives(rig: Rig) -> None:
    kernel = replace(await rig.create("k1"), reason="its record cannot be read")
    rig.state.put_kernel(kernel)
    expected = Condition("kernel/k1", "kernel k1: its record cannot be read", agents=("a",))
    assert [*kernel_conditions(rig.state)] == [expected]


async def test_holder_of_a_removed_agent_is_a_condition(rig: Rig) -> None:
    kernel = await rig.create("k1", cuda_device=1)
    rig.state.drop_kernel("k1")
    rig.state.put_kernel(replace(kernel, agent_id="gone"))
    (condition,) = agent_conditions(rig.node)
    assert (condition.about, condition.agents) == ("agent/gone", ("gone",))
    assert "devices are still held by kernel k1" in condition.reason


async def test_device_held_by_two_is_a_condition(rig: Rig) -> None:
    kernel = await rig.create("k1", cuda_device=1)
    assert [*excess_conditions(rig.node)] == []
    gpu = replace(kernel.allocation, shares=kernel.allocation.shares_by_device_name("cuda"))
    holder = NameHolder("x")
    claim = Claim("c1", "a", holder, "hash", 0.0, "boot-1", allocation=gpu, is_observed=True)
    rig.state.put_claim(claim)
    (condition,) = excess_conditions(rig.node)
    assert condition.about.startswith("device/cuda/")
    assert condition.agents == ("a",)
    assert "held by kernel k1 and claim c1: an engine uses it already" in condition.reason


async def test_engine_is_a_condition_until_it_is_ready(rig: Rig) -> None:
    engines = AwaitedEngines(rig.devices, rig.memory, "boot-1", {"slurm": "all"})
    (condition,) = engine_conditions(engines)
    assert condition.about == "engine/slurm"
    engines.report("slurm", is_ready=True)
    assert [*engine_conditions(engines)] == []


async def test_status_line_has_the_number_and_the_first(rig: Rig, listed: Listed) -> None:
    line = status_line("n", rig.node, listed.conditions.current())
    assert line == "node n: 0 kernels, 0 ended; 2 accelerators"
    listed.found = [LOST, Condition("log", "lines are lost")]
    troubles = "; 2 troubles, cuda3 is unhealthy: GPU is lost (reset it)"
    assert status_line("n", rig.node, listed.conditions.current()) == line + troubles

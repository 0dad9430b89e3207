"""Nodes that, as far as the store tells, answer nobody: a probe decides on their calls."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
from aiohttp import web
from msgspec.structs import replace

from agentd_fleet.nodes import calls
from agentd_fleet.nodes.calls import GATEWAY, NodeNotCalled, Nodes
from agentd_fleet.view import fleet_state
from agentd_fleet.view.fleet_state import (
    ANSWER_TIMEOUT_S,
    ANSWERED_S,
    SILENT_STATUSES,
    FleetState,
)
from agentd_fleet.view.fleet_view import NodeStatus
from fleet.field.test_unreachable_nodes import NODE, Place, answered, listed, place
from fleet.simulated import VirtualLoop
from support.waiting import until

__all__ = ["place"]

DURING_A_CALL: dict[str, tuple[Callable[[FleetState], None], Callable[[FleetState], None], bool]]
DURING_A_CALL = {
    "another call fails": (
        lambda state: state.set_unreachable(NODE, "reset"),
        lambda _: None,
        True,
    ),
    "it is lost for a moment": (
        lambda state: state.mark_lost(NODE, 0.0),
        lambda state: state.update_node(listed("http://a")),
        True,
    ),
    "it is lost": (lambda state: state.mark_lost(NODE, 0.0), lambda _: None, False),
    "its report gets a newer schema": (
        lambda state: state.update_node(replace(listed("http://a"), status=NodeStatus.NEWER)),
        lambda _: None,
        True,
    ),
    "it is forgotten": (lambda state: state.forget(NODE), lambda _: None, False),
}


@pytest.mark.parametrize(
    ("event", "then", "is_answered"), DURING_A_CALL.values(), ids=DURING_A_CALL
)
def test_slow_call_goes_on_while_its_node_answers(
    event: Callable[[FleetState], None], then: Callable[[FleetState], None], *, is_answered: bool
) -> None:
    async def stop_slowly() -> None:
        loop, state = asyncio.get_running_loop(), FleetState()
        state.update_node(listed("http://a"))
        loop.call_later(1.0, event, state)
        loop.call_later(2.0, then, state)
        with nullcontext() if is_answered else pytest.raises(TimeoutError):
            async with state.call_timeout(NODE, 3600.0):
                await asyncio.sleep(60)
        assert loop.time() < 61

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(stop_slowly())


@pytest.mark.parametrize("status", NodeStatus)
async def test_node_that_is_said_to_be_silent_is_probed_first(
    place: Place, status: NodeStatus
) -> None:
    """Only its publisher may be away, so one that answers has its usual time."""
    state, asked = FleetState(), []

    async def note(request: web.Request) -> web.Response:
        asked.append(request.method)
        return await answered(request)

    place.answer = note
    node = replace(listed(await place.serve()), status=status)
    state.update_node(node)
    async with Nodes(state) as nodes:
        for _ in range(2):
            await nodes.call(node, GATEWAY, "DELETE", "/v1/kernels/k", patience_s=60.0)
        assert not state.is_silent(NODE)
        if status in SILENT_STATUSES:
            assert asked == ["GET", "DELETE", "DELETE"]
        else:
            assert asked == ["DELETE", "DELETE"]


async def test_node_that_turns_silent_during_calls_is_probed_once(place: Place) -> None:
    state, asked, waits = FleetState(), asyncio.Queue[str](), asyncio.Event()

    async def note(request: web.Request) -> web.Response:
        await asked.put(request.method)
        if request.method == "DELETE":
            await waits.wait()
        return await answered(request)

    place.answer = note
    node = listed(await place.serve())
    state.update_node(node)
    async with Nodes(state) as nodes:
        deletes = [
            asyncio.create_task(nodes.call(node, GATEWAY, "DELETE", f"/v1/kernels/k{n}"))
            for n in range(3)
        ]
        assert {await asked.get() for _ in deletes} == {"DELETE"}
        state.mark_lost(NODE, 0.0)
        assert await asked.get() == "GET"
        await until(lambda: state.has_answered(NODE))
        waits.set()
        assert {(await answer).status for answer in deletes} == {200}
        assert asked.empty()


def test_answer_of_a_silent_node_vouches_until_the_next_failure() -> None:
    """Its publisher is away and its daemon answers, until that freezes as well."""

    async def story(failure_after_s: float | None, within_s: float) -> None:
        loop, state = asyncio.get_running_loop(), FleetState()
        state.probe_soon = lambda _: state.set_unreachable(NODE, "no answer in time")
        state.update_node(replace(listed("http://a"), status=NodeStatus.LOST))
        state.set_unreachable(NODE, "")
        if failure_after_s is not None:
            loop.call_later(failure_after_s, state.set_unreachable, NODE, "no answer in time")
        began = loop.time()
        with pytest.raises(TimeoutError):
            async with state.call_timeout(NODE, 3600.0):
                await asyncio.sleep(4000)
        assert loop.time() - began <= within_s
        assert state.is_silent(NODE)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(story(1.0, 1.0 + ANSWER_TIMEOUT_S))
        runner.run(story(None, ANSWERED_S + ANSWER_TIMEOUT_S))


def test_silent_node_that_answers_probes_has_its_time() -> None:
    async def story() -> None:
        state, probes = FleetState(), 0

        def answer(_: str) -> None:
            nonlocal probes
            probes += 1
            state.set_unreachable(NODE, "")

        state.probe_soon = answer
        state.update_node(replace(listed("http://a"), status=NodeStatus.LOST))
        state.set_unreachable(NODE, "")
        async with state.call_timeout(NODE, 3600.0):
            await asyncio.sleep(60)
        assert probes == 60 // ANSWERED_S

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(story())


async def test_answers_of_a_ready_node_cost_its_calls_nothing() -> None:
    state = FleetState()
    state.update_node(listed("http://a"))
    asked = 0

    def limit() -> None:
        nonlocal asked
        asked += 1

    state._limit_callbacks[NODE] |= {partial(limit) for _ in range(100)}
    for reason in ("", "", "reset", "reset", "") * 10:
        state.set_unreachable(NODE, reason)
    assert asked == 0


async def test_silent_node_that_answers_no_probe_was_not_called(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (calls, fleet_state):
        monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.3)
    asked = []

    async def note(request: web.Request) -> web.Response:
        asked.append(request.method)
        await asyncio.Event().wait()
        raise AssertionError

    place.answer = note
    state, node = FleetState(), replace(listed(await place.serve()), status=NodeStatus.LOST)
    state.update_node(node)
    async with Nodes(state) as nodes:
        with pytest.raises(NodeNotCalled):
            await nodes.call(node, GATEWAY, "POST", "/v1/agents/a/kernels", body=b"x")
    assert asked == ["GET"]

"""The gateway's metrics: every caller gets all series, and known counters start at zero."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from aiohttp.test_utils import make_mocked_request

from agentd.client.errors import error_from_problem
from agentd.core.access import Caller, Role
from agentd.errors import AgentdError, KernelConflict
from agentd.http.problem_responses import CREATE_CODES
from agentd.http.prometheus import render_exposition
from agentd_fleet.gateway import handlers
from agentd_fleet.gateway.metrics import GatewayCounts, fleet_metrics
from agentd_fleet.placement.backend import FleetBackend
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import FleetView

ADMIN = Caller("root", Role.ADMIN)
TEAM = Caller("team", Role.AGENT, frozenset({"agent-1"}))


def creates(counts: GatewayCounts, caller: Caller) -> dict[str, float]:
    text = render_exposition(fleet_metrics(FleetView(), caller, counts, is_live=True)).decode()
    prefix = 'agentd_fleet_creates_total{result="'
    rows = [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]
    return {name: float(value) for name, value in (row.split('"} ') for row in rows)}


@pytest.mark.parametrize("caller", [ADMIN, TEAM], ids=lambda caller: caller.role.value)
def test_counter_of_creates_starts_at_zero_for_every_result(caller: Caller) -> None:
    counts = GatewayCounts()
    assert creates(counts, caller) == dict.fromkeys({"placed", "Other", *CREATE_CODES}, 0)
    with pytest.raises(KernelConflict), counts.create():
        raise KernelConflict("taken")
    with counts.create():
        pass
    after = creates(counts, caller)
    assert {name: value for name, value in after.items() if value} == {
        "KernelConflict": 1,
        "placed": 1,
    }


def test_nodes_choose_no_labels() -> None:
    counts = GatewayCounts()
    for number in range(100):
        content = {"code": f"Own{number}" + "x" * 20_000, "status": 422, "detail": "so"}
        error = error_from_problem(content)
        assert len(error.code) <= 64
        with pytest.raises(AgentdError), counts.create():
            raise error
    after = creates(counts, ADMIN)
    assert (after["Other"], after.keys()) == (100, {"placed", "Other", *CREATE_CODES})


async def test_scrape_waits_for_no_thread_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = []

    def statistics(view: FleetView, *, agents: frozenset[str] | None) -> dict[str, object]:
        threads.append(threading.current_thread())
        return {}

    loop, answered = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    names = loop.run_in_executor(None, answered.wait, 20)  # a name service that does not answer
    monkeypatch.setattr(FleetView, "statistics", statistics)
    monkeypatch.setattr(handlers, "caller_of", lambda _: TEAM)
    store = SimpleNamespace(stale_reason=lambda: "")
    gateway = handlers.Gateway(FleetBackend(store, FleetState(), nodes=None), placer=None)
    response = await gateway.get_metrics(make_mocked_request("GET", "/metrics"))
    assert b"agentd_fleet_view_live 1.0" in response.body
    assert threads
    assert threading.main_thread() not in threads
    assert not names.done()
    answered.set()

"""One plugin over the life of the daemon: lost, started again, slow, in the way."""

import asyncio
import re

import pytest
from structlog.testing import capture_logs

from agentd.config.plugins import PluginTable
from agentd.core.conditions import Condition
from agentd.errors import PluginUnavailable
from agentd.pluginhost import instance as plugin_instance
from agentd.pluginhost import process as plugin_process
from agentd.pluginhost.instance import MAX_WAKES, PluginTimeouts
from agentd.services.protocols import PluginState
from pluginhost.rig import (
    PROCESS,
    given,
    helpers,
    opened,
    pid_of,
    scripted,
    states,
    until,
    until_no_helpers,
    until_ready,
)
from support.host_faults import make_killable, make_unkillable


async def test_a_plugin_that_leaks_is_started_again(host, tmp_path) -> None:
    table, file = scripted(tmp_path)
    made = host([table], Scripted="Scripted", max_memory_bytes=128 << 20)
    await opened(made)
    file.write_text("leak")
    await until(made, lambda: states(made)["one"] is PluginState.FAILED)
    assert re.fullmatch(r"it uses \d+ MiB of memory", made.statuses()[0].reason)
    with pytest.raises(PluginUnavailable, match="plugin one is failed"):
        await made.container_edits(given("one"), PROCESS)
    file.write_text("fine")
    await until_ready(made, "one")
    assert made.vitals()["one"].restarts == 1
    assert made.vitals()["one"].listing_age_s is not None


@pytest.mark.parametrize("word", ["crash", "hang"])
async def test_helpers_end_with_their_plugin(host, tmp_path, word) -> None:
    nap = f"{10**6 + int(tmp_path.stat().st_ino)}"
    file = tmp_path / "script"
    file.write_text("fine")
    settings = {"file": str(file), "nap": nap}
    made = host([PluginTable(name="one", plugin="w", settings=settings)], w="WithHelpers",
                call_timeout_s=0.5)  # fmt: skip
    await opened(made)
    assert len(helpers(nap)) == 3
    file.write_text(word)
    await until(made, lambda: states(made)["one"] is PluginState.FAILED)
    await until_no_helpers(nap)
    file.write_text("fine")
    await until_ready(made, "one")
    await made.close()
    await until_no_helpers(nap)


async def test_wait_for_events_that_fails_is_a_condition_and_resumes(host, tmp_path) -> None:
    table, file = scripted(tmp_path, "LosesEvents")
    made = host([table], LosesEvents="LosesEvents")

    async def conditions(count: int) -> list[Condition]:
        async with asyncio.timeout(10):
            while len(found := [c for c in made.conditions() if c.about == "plugin/one"]) != count:
                await asyncio.sleep(0.01)
        return found

    await opened(made)
    assert await conditions(0) == []
    file.write_text("deaf")
    reason = "plugin one cannot wait for events, and changes are found every 0.1 s only"
    for _ in range(2):
        assert await conditions(1) == [
            Condition("plugin/one", f"{reason}: OverflowError: no more events")
        ]
        file.write_text("fine")
        await conditions(0)
        file.write_text("deaf")


async def test_a_hung_call_does_not_hold_up_the_end(host, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(plugin_instance, "CLOSE_TIMEOUT_S", 0.1)
    table, file = scripted(tmp_path)
    made = host([table], Scripted="Scripted", call_timeout_s=600)
    await opened(made)
    file.write_text("hang")
    instance = made._instances["one"]
    async with asyncio.timeout(10):
        while not instance._process._call_lock.locked():
            await asyncio.sleep(0.01)
        await made.close()


async def test_a_plugin_that_is_slow_to_hear_holds_up_no_create(host, tmp_path) -> None:
    gate = tmp_path / "gate"
    settings = {"file": str(tmp_path / "heard"), "gate": str(gate)}
    made = host([PluginTable(name="one", plugin="s", settings=settings)], s="SlowToHear",
                call_timeout_s=600)  # fmt: skip
    await opened(made)
    with capture_logs() as logged:
        for n in range(plugin_instance.MAX_EVENTS_WAITING + 3):
            made.notify("after-start", f"k{n}", given("one"))
    assert [entry["event"] for entry in logged] == 3 * ["plugin.event_dropped"]
    gate.touch()
    assert (await made.container_edits(given("one"), PROCESS)).env["ONE"] == "one0"


async def test_unkillable_plugin_processes_are_limited_to_two(host, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(plugin_process, "KILL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(plugin_instance, "MIN_BACKOFF_S", 0.1)
    table, file = scripted(tmp_path)
    made = host([table], Scripted="Scripted", two="Good", call_timeout_s=0.5)
    pids = []
    for _ in range(2):
        await (until_ready(made, "one") if pids else opened(made))
        pids.append(pid_of(made, "one"))
        make_unkillable(pids[-1])
        file.write_text("hang")
        await until(made, lambda: states(made)["one"] is PluginState.FAILED)
        reason = made.statuses()[0].reason
        assert reason.endswith(f"process {pids[-1]} cannot be killed and was abandoned")
        file.write_text("fine")
    await until(made, lambda: made.statuses()[0].reason.startswith("processes"))
    assert f"processes {pids[0]}, {pids[1]} cannot be killed" in made.statuses()[0].reason
    assert states(made)["two"] is PluginState.READY
    for pid in pids:
        make_killable(pid)
    await until_ready(made, "one")


async def test_a_plugin_that_has_events_is_listed_at_once(host, tmp_path, monkeypatch) -> None:
    table, file = scripted(tmp_path, "TellsOfChanges")
    made = host([table], TellsOfChanges="TellsOfChanges")
    made._instances["one"]._timeouts = PluginTimeouts(health_interval_s=3600)
    await opened(made)
    file.write_text("none")
    await until(made, lambda: made.listings()[0].devices == ())


async def test_restless_plugin_is_listed_less_often(host, tmp_path) -> None:
    table, file = scripted(tmp_path, "AlwaysTellsOfChanges")
    made = host([table], AlwaysTellsOfChanges="AlwaysTellsOfChanges")
    made._instances["one"]._timeouts = PluginTimeouts(health_interval_s=3600)
    with capture_logs() as logged:
        await opened(made)
        told = 0
        async with asyncio.timeout(30):
            while told < MAX_WAKES + 5:
                await asyncio.sleep(0.02)
                told = file.read_text().count("told")
    assert file.read_text().count("listed") == 1 + MAX_WAKES
    assert [line["event"] for line in logged].count("plugin.throttled") == 1


async def test_plugins_hear_of_their_kernels_in_order(host, tmp_path) -> None:
    file = tmp_path / "heard"
    made = host([PluginTable(name="one", plugin="h", settings={"file": str(file)})], h="Hears")
    await opened(made)
    for step in ("before-create", "after-start"):
        made.notify(step, "k1", given("one"))
    await made.container_edits(given("one"), PROCESS)
    assert file.read_text() == "before-create k1 one0\nafter-start k1 one0\n"

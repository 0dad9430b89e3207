"""Plugins that an operator stops and starts: nothing of them runs meanwhile."""

import asyncio
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from agentd.concurrency import silent_subjects
from agentd.config.plugins import PluginTable
from agentd.errors import Conflict, PluginUnavailable, UnknownPlugin
from agentd.host.processes import Proc, read_env
from agentd.pluginhost import process as plugin_process
from agentd.pluginhost.descendants import MARK, kill_marked, new_mark
from agentd.services.protocols import PluginState
from pluginhost.rig import PROCESS, given, opened, pid_of, scripted, states, until, until_ready
from support.host_faults import make_killable, make_unkillable
from support.waiting import until_blocking

STOPPED = (PluginState.STOPPED, "stopped by ann")


async def stop(made, name: str = "one") -> tuple[PluginState, str]:
    status = await made.stop(name, "stopped by ann")
    return status.state, status.reason


async def test_stopped_plugin_has_no_process_and_keeps_its_listing(host, tmp_path) -> None:
    table, _ = scripted(tmp_path)
    made = host([table], Scripted="Scripted")
    await opened(made)
    process, (before,) = Path(f"/proc/{pid_of(made, 'one')}"), made.listings()
    assert await stop(made) == STOPPED
    assert not process.exists()
    assert made.listings() == [before]
    with pytest.raises(PluginUnavailable, match="plugin one is stopped by ann"):
        await made.container_edits(given("one"), PROCESS)
    with pytest.raises(Conflict, match="stopped by ann; start it with agentctl plugins start one"):
        await made.retry("one")
    assert (await made.start("one")).state is PluginState.READY
    assert made.listings() == [before]


@pytest.mark.parametrize("end", ["stop", "crash"])
async def test_end_of_a_process_ends_what_it_reported(host, tmp_path, end: str) -> None:
    table, file = scripted(tmp_path, "Complains")
    made = host([table], Complains="Complains")
    await opened(made)
    (listing,) = made.listings()
    assert [info.reason for info in listing.conditions] == ["it is not watched"]
    async with asyncio.timeout(10):
        while not [*made.conditions()]:
            await asyncio.sleep(0.01)
    if end == "stop":
        await stop(made)
    else:
        file.write_text("crash")
        await until(made, lambda: states(made)["one"] is PluginState.FAILED)
    (listing,) = made.listings()
    assert listing.conditions == ()
    file.write_text("silent")
    await made.start("one")
    await until_ready(made, "one")
    assert [*made.conditions()] == []


async def test_stop_waits_for_a_call_and_ends_one_that_hangs(host, tmp_path) -> None:
    table, file = scripted(tmp_path)
    made = host([table], Scripted="Scripted", call_timeout_s=0.5)
    await opened(made)
    file.write_text("hang")
    async with asyncio.timeout(10):
        while not made._instances["one"]._process._call_lock.locked():
            await asyncio.sleep(0.01)
    process = Path(f"/proc/{pid_of(made, 'one')}")
    assert await stop(made) == STOPPED
    assert not process.exists()


async def test_stop_is_refused_while_a_driver_keeps_the_process(
    host, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(plugin_process, "KILL_TIMEOUT_S", 0.2)
    table, _ = scripted(tmp_path)
    made = host([table], Scripted="Scripted")
    await opened(made)
    stuck = pid_of(made, "one")
    make_unkillable(stuck)
    for _ in range(2):
        with pytest.raises(Conflict, match=f"cannot be stopped: process {stuck} cannot be killed"):
            await stop(made)
        await until_ready(made, "one")
    make_killable(stuck)
    async with asyncio.timeout(10):
        while made._instances["one"].stuck_reason():
            await asyncio.sleep(0.01)
    assert await stop(made) == STOPPED


async def test_plugin_that_fails_can_be_stopped_and_started(host, tmp_path) -> None:
    table, file = scripted(tmp_path)
    made = host([table], Scripted="Scripted")
    await opened(made)
    file.write_text("raise")
    await until(made, lambda: states(made)["one"] is PluginState.FAILED)
    assert await stop(made) == STOPPED
    status = await made.start("one")
    assert (status.state, status.is_serving) == (PluginState.FAILED, False)
    file.write_text("fine")
    await until_ready(made, "one")
    assert made.statuses()[0].is_serving


async def test_stopped_plugin_is_not_opened_at_a_start(host, tmp_path) -> None:
    table, file = scripted(tmp_path, "one")
    known = host([table], one="Scripted")
    await opened(known)
    (kept,) = known.listings()
    required = table.model_copy(update={"required": True})
    kept = replace(kept, is_restored=True)
    stopped = {"one": ("stopped by ann", kept), "two": ("stopped by ann", None)}
    made = host([required], one="Scripted", two="CrashesAtOpen", stopped=stopped)
    assert await opened(made) == {"one": STOPPED, "two": STOPPED}
    assert (made.listings(), made.required_failures()) == ([kept], {})
    assert not any(i._process for i in made._instances.values())
    assert (await made.container_edits(given(), PROCESS)).env == {"ONE": "", "TWO": ""}
    assert [*made.conditions()] == []
    file.write_text("two")
    assert (await made.start("one")).state is PluginState.READY
    (listed,) = made.listings()
    assert (len(listed.devices), listed.is_restored) == (2, False)


async def test_table_of_a_stopped_plugin_is_checked_at_a_start(host) -> None:
    table = PluginTable(name="one", plugin="one", settings={"colour": "red"})
    made = host([table], one="Good", stopped={"one": ("stopped by ann", None)})
    assert await opened(made) == {"one": STOPPED}
    assert [str(problem) for problem in made.problems()] == ["plugins.one.colour: unknown key"]


async def test_stopped_plugin_that_cannot_be_loaded_is_a_condition(host) -> None:
    made = host(good="Missing", stopped={"good": ("stopped by ann", None)})
    assert await opened(made) == {"good": STOPPED}
    (condition,) = made.conditions()
    assert condition.about == "plugin/good"
    assert condition.reason.startswith("kernels may see the devices of plugin good: import: ")
    instance = made._instances["good"]
    instance.spec = replace(instance.spec, target="support.faulty_plugins:Good")
    assert (await made.start("good")).state is PluginState.READY
    assert await stop(made, "good") == STOPPED
    assert [*made.conditions()] == []


async def test_plugin_that_is_stopped_before_it_answers_hides_nothing(host, tmp_path) -> None:
    table = PluginTable(name="one", plugin="one", settings={"file": str(tmp_path / "gate")})
    made = host([table], one="MadeSlowly")
    await made.open(0.1)
    assert await stop(made) == STOPPED
    (condition,) = made.conditions()
    reason = "kernels may see the devices of plugin one: it has not told how to hide them"
    assert (condition.about, condition.reason) == ("plugin/one", reason)


async def test_plugin_is_started_while_it_is_being_prepared(host, tmp_path) -> None:
    gate = tmp_path / "gate"
    table = PluginTable(name="one", plugin="one", settings={"file": str(gate)})
    made = host([table], one="MadeSlowly", stopped={"one": ("stopped by ann", None)})
    assert await opened(made, 0.1) == {"one": STOPPED}
    gate.touch()
    assert (await made.start("one")).state is PluginState.READY
    assert made.statuses()[0].reason == ""


async def test_only_a_plugin_that_could_run_is_stopped(host) -> None:
    made = host([PluginTable(name="one", plugin="good")], block=["good"], good="Good")
    await opened(made)
    with pytest.raises(Conflict, match="plugin one is blocked"):
        await stop(made)
    with pytest.raises(UnknownPlugin, match="unknown plugin 'three'"):
        await stop(made, "three")


async def test_environment_that_nobody_can_read_delays_no_plugin(
    host, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a process whose memory is locked while it waits for a dead mount."""
    answered = threading.Event()

    def hang(pid: int) -> dict[str, str]:
        return read_env(pid) if pid != os.getpid() or answered.wait(20) else {}

    monkeypatch.setattr("agentd.pluginhost.descendants.read_env", hang)
    monkeypatch.setattr("agentd.concurrency.ANSWER_TIMEOUT_S", 0.5)
    table, _ = scripted(tmp_path)
    made = host([table], Scripted="Scripted")
    await opened(made)
    assert states(made)["one"] is PluginState.READY
    subject = f"the environment of process {os.getpid()}"
    assert subject in silent_subjects()
    for _ in range(3):
        environ = {MARK: (mark := new_mark()), "PATH": os.environ["PATH"]}
        with subprocess.Popen(["sleep", "1000"], env=environ) as helper:
            await kill_marked(mark)
        assert helper.returncode == -signal.SIGKILL, "it is behind the one that is stuck"
    assert await stop(made) == STOPPED
    assert [thread.name for thread in threading.enumerate()].count(subject) == 1
    answered.set()
    until_blocking(silent_subjects, lambda silent: subject not in silent)


async def test_concurrent_ends_share_the_wait_for_a_stuck_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered, subject = threading.Event(), f"the environment of process {os.getpid()}"
    own = [Proc(os.getpid(), 1)]
    monkeypatch.setattr("agentd.pluginhost.descendants.all_processes", lambda: own)
    monkeypatch.setattr("agentd.pluginhost.descendants.read_env", lambda _: answered.wait(20) or {})
    monkeypatch.setattr("agentd.concurrency.ANSWER_TIMEOUT_S", 0.5)
    await asyncio.gather(*(kill_marked(f"mark-{number}") for number in range(40)))
    assert [thread.name for thread in threading.enumerate()].count(subject) == 1
    answered.set()
    until_blocking(silent_subjects, [])

import asyncio
import errno
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import pytest
from importlib_metadata import EntryPoint
from structlog.testing import capture_logs

from agentd.config.plugins import PluginTable
from agentd.core.allocation import Allocation, Share
from agentd.core.devices import DeviceId
from agentd.core.slots import ONE, SlotKind
from agentd.errors import PluginUnavailable
from agentd.host.processes import all_processes
from agentd.plugin_api import Features
from agentd.pluginhost import instance as plugin_instance
from agentd.pluginhost import process as plugin_process
from agentd.pluginhost.host import PluginHost, installed
from agentd.pluginhost.instance import Pace
from agentd.services.interfaces import PluginState
from unkillable import hold, let_go

PROCESS = Features("process")


def point(name: str, target: str) -> EntryPoint:
    return EntryPoint(name, f"zoo:{target}", "agentd.accelerators")


class Hosts:
    """Makes plugin hosts, and closes them at the end."""

    def __init__(self) -> None:
        self.made: list[PluginHost] = []

    def __call__(
        self,
        tables: Sequence[PluginTable] = (),
        allow=(),
        block=(),
        call_timeout_s: float = 5.0,
        most_memory_bytes: int = Pace.most_memory_bytes,
        points: Mapping[str, EntryPoint] | None = None,
        **targets: str,
    ) -> PluginHost:
        points = points or {name: point(name, target) for name, target in targets.items()}
        pace = Pace(call_timeout_s, 0.1, most_memory_bytes)
        made = PluginHost(tables, allow, block, features=PROCESS, pace=pace, points=points)
        self.made.append(made)
        return made


@pytest.fixture
async def host() -> AsyncIterator[Hosts]:
    made = Hosts()
    yield made
    for each in made.made:
        await each.close()


async def opened(made: PluginHost, timeout_s: float = 10) -> dict[str, tuple[PluginState, str]]:
    await made.open(timeout_s)
    return {status.name: (status.state, status.reason) for status in made.statuses()}


def states(made: PluginHost) -> dict[str, PluginState]:
    return {status.name: status.state for status in made.statuses()}


async def until(made: PluginHost, name: str, holds: Callable[[], bool]) -> None:
    """Follow the changes of a plugin until something holds."""
    async with asyncio.timeout(10):
        changes = made.changes()
        while not holds():
            assert await anext(changes) == name


async def until_ready(made: PluginHost, name: str) -> None:
    await until(made, name, lambda: states(made)[name] is PluginState.READY)


async def test_an_installed_plugin_loads_by_itself_under_its_own_name(host) -> None:
    made = host(good=("Good"), table_only="NeedsTable")
    assert await opened(made) == {"good": (PluginState.READY, "")}
    (listing,) = made.listings()
    assert [slot.name for slot in listing.slot_types] == ["good.device"]
    assert listing.devices[0].device_id == ("good", "good0")


async def test_one_entry_point_serves_several_tables_and_a_table_replaces_automatic_loading(
    host,
) -> None:
    tables = [
        PluginTable(name="cuda", plugin="good", settings={"speed": 1}),
        PluginTable(name="good", plugin="good"),
    ]
    made = host(tables, good="Good")
    assert set(await opened(made)) == {"cuda", "good"}
    assert [listing.name for listing in made.listings()] == ["cuda", "good"]


@pytest.mark.parametrize(("allow", "block"), [(("a",), ()), ((), ("b",))])
async def test_allow_and_block_hold_entry_point_names(host, allow, block) -> None:
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
        ("HalfUnique", "a unique slot is given whole"),
        ("OddId", "its id 'a/b c' is none"),
        ("UnknownSlot", "offers 'x.y', which is no slot type of it"),
        ("BadHealth", "the health of d0 is 'so-so'"),
        ("Twice", "it lists the id bad0 twice"),
        ("OddParent", "Expected `str | null`, got `int` - at `$.devices[0].parent`"),
        ("OddAliases", "Expected `array`, got `str` - at `$.devices[0].aliases`"),
        ("OddNode", "the NUMA node of d0 is -1"),
        ("OddEdits", "Expected `str`, got `int`"),
        ("ListsNonsense", "Expected `object`, got `str` - at `$.devices[0]`"),
        ("CrashesAtOpen", "open: it was killed by SIGSEGV; next try in 1 s"),
        ("LeavesAtOpen", "open: it exited with status 7; next try in 1 s"),
        ("ClosesEverything", "open: "),
    ],
)
async def test_a_plugin_that_misbehaves_is_reported_and_left_out(
    host, target: str, why: str
) -> None:
    made = host(good="Good", bad=target)
    seen = await opened(made)
    assert seen["good"][0] is PluginState.READY
    assert seen["bad"][0] is PluginState.FAILED
    assert why in seen["bad"][1]
    assert [listing.name for listing in made.listings()] == ["good"]


@pytest.mark.parametrize(
    ("source", "state", "why"),
    [
        ("1 / 0", PluginState.FAILED, "import: ZeroDivisionError: division by zero"),
        ("import nothing_of_this_name", PluginState.FAILED, "import: ModuleNotFoundError"),
        ("def", PluginState.FAILED, "import: SyntaxError"),
        ("import os; os._exit(4)", PluginState.FAILED, "import: it exited with status 4"),
        ("import os; os.abort()", PluginState.FAILED, "import: it was killed by SIGABRT"),
        ("import sys; sys.exit()", PluginState.FAILED, "import: SystemExit"),
        ("import time; time.sleep(1000)", PluginState.PENDING, "has not opened within 2 s"),
        ("print('hello'); from zoo import Good as Plugin", PluginState.READY, ""),
    ],
)
async def test_a_module_that_misbehaves_at_import_harms_nothing(
    host, tmp_path, monkeypatch, source, state, why
) -> None:
    (tmp_path / "odd.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    points = {
        "bad": EntryPoint("bad", "odd:Plugin", "agentd.accelerators"),
        "good": point("good", "Good"),
    }
    seen = await opened(host(points=points), 2)
    assert seen["good"][0] is PluginState.READY
    assert seen["bad"][0] is state
    assert seen["bad"][1].startswith(why)


async def test_a_plugin_that_is_not_installed_is_named_with_the_nearest(host) -> None:
    states = await opened(host([PluginTable(name="x", plugin="goood")], good="Good"))
    assert "did you mean good? installed: good" in states["x"][1]


async def test_wrong_settings_are_listed_with_their_place(host) -> None:
    tables = [PluginTable(name="cuda", plugin="good", settings={"sped": 1, "x": 2})]
    made = host(tables, good="Good")
    await made.open(5)
    problems = made.problems()
    assert [problem.where for problem in problems] == ["plugins.cuda.sped", "plugins.cuda.x"]


@pytest.mark.parametrize("target", ["Late", "ListsSlowly", "MadeSlowly"])
async def test_readiness_does_not_wait_for_a_late_plugin_and_it_joins_when_it_opens(
    host: Hosts, tmp_path: Path, target: str
) -> None:
    file = tmp_path / "go"
    table = PluginTable(name="late", plugin="late", settings={"file": str(file)})
    made = host([table], late=target)
    assert await opened(made, 0.5) == {"late": (PluginState.PENDING, "has not opened within 0.5 s")}
    file.touch()
    await until(made, "late", lambda: states(made)["late"] is PluginState.READY)
    assert [listing.name for listing in made.listings()] == ["late"]


async def test_a_required_plugin_that_failed_is_reported_as_such(host) -> None:
    made = host([PluginTable(name="bad", plugin="bad", required=True)], bad="RaisesAtOpen")
    await opened(made)
    assert made.failed_required() == [
        "plugin bad is required and failed: open: RuntimeError: no driver here"
    ]


def given(*names: str) -> Allocation:
    return Allocation(
        tuple(
            Share(DeviceId(name, f"{name}0"), "S", f"{name}.device", SlotKind.COUNT, ONE)
            for name in names
        )
    )


async def test_edits_give_what_was_allocated_and_hide_all_else(host) -> None:
    made = host(one="Good", two="Good")
    await opened(made)
    assert (await made.container_edits(given("one"), PROCESS)).env == {"ONE": "one0", "TWO": ""}
    assert (await made.container_edits(given(), PROCESS)).env == {"ONE": "", "TWO": ""}


def scripted(tmp_path: Path, target: str = "Scripted") -> tuple[PluginTable, Path]:
    file = tmp_path / "script"
    file.write_text("fine")
    return PluginTable(name="one", plugin=target, settings={"file": str(file)}), file


async def test_edits_that_fail_are_the_plugin_s_fault_and_say_so(host, tmp_path) -> None:
    table, file = scripted(tmp_path)
    made = host([table], Scripted="Scripted", two="Good")
    await opened(made)
    file.write_text("broken")
    with pytest.raises(PluginUnavailable, match=r"plugin one .* driver gone"):
        await made.container_edits(given("one"), PROCESS)
    env = (await made.container_edits(given(), PROCESS)).env
    assert (env["ONE"], env["TWO"]) == ("", "")


def pid_of(made: PluginHost, name: str) -> int:
    return made._instances[name]._process.pid


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("crash", "it was killed by SIGKILL; next try in 1 s"),
        ("hang", "listing: no answer within 0.5 s; next try in 1 s"),
        ("raise", "list: OSError: the driver is gone; next try in 1 s"),
    ],
)
async def test_a_plugin_that_is_lost_is_started_again_and_keeps_its_slots(
    host, tmp_path, word, why
) -> None:
    table, file = scripted(tmp_path)
    made = host([table], Scripted="Scripted", two="Good", call_timeout_s=0.5)
    await opened(made)
    first = pid_of(made, "one")
    file.write_text(word)
    await until(made, "one", lambda: states(made)["one"] is PluginState.FAILED)
    status = made.statuses()[0]
    assert (status.reason, status.slots) == (why, ("one.device",))
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    with pytest.raises(PluginUnavailable, match="plugin one is failed"):
        await made.container_edits(given("one"), PROCESS)
    env = (await made.container_edits(given("two"), PROCESS)).env
    assert (env["ONE"], env["TWO"]) == ("", "two0")
    file.write_text("fine")
    await until(made, "one", lambda: states(made)["one"] is PluginState.READY)
    assert pid_of(made, "one") != first


async def test_a_plugin_that_leaks_is_started_again(host, tmp_path) -> None:
    table, file = scripted(tmp_path)
    made = host([table], Scripted="Scripted", most_memory_bytes=128 << 20)
    await opened(made)
    file.write_text("leak")
    await until(made, "one", lambda: states(made)["one"] is PluginState.FAILED)
    assert re.fullmatch(r"it uses \d+ MiB of memory; next try in 1 s", made.statuses()[0].reason)
    file.write_text("fine")
    await until(made, "one", lambda: states(made)["one"] is PluginState.READY)


def helpers(nap: str) -> list[int]:
    return [
        stat.pid
        for stat in all_processes()
        if Path(f"/proc/{stat.pid}/cmdline").read_bytes() == f"sleep\0{nap}\0".encode()
    ]


@pytest.mark.parametrize("word", ["crash", "hang"])
async def test_what_a_plugin_started_ends_with_it(host, tmp_path, word) -> None:
    nap = f"{10**6 + int(tmp_path.stat().st_ino)}"
    file = tmp_path / "script"
    file.write_text("fine")
    settings = {"file": str(file), "nap": nap}
    made = host([PluginTable(name="one", plugin="w", settings=settings)], w="WithHelpers",
                call_timeout_s=0.5)  # fmt: skip
    await opened(made)
    assert len(helpers(nap)) == 3
    file.write_text(word)
    await until(made, "one", lambda: states(made)["one"] is PluginState.FAILED)
    assert helpers(nap) == []
    file.write_text("fine")
    await until_ready(made, "one")
    await made.close()
    assert helpers(nap) == []


async def test_no_more_descriptors_is_not_the_end_of_a_plugin(host, tmp_path, monkeypatch) -> None:
    table, file = scripted(tmp_path)
    made = host([table], Scripted="Scripted")
    await opened(made)

    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(plugin_process.socket, "socketpair", none_left)
    monkeypatch.setattr(plugin_instance, "LONGEST_PAUSE_S", 0.1)
    file.write_text("crash")
    await until(made, "one", lambda: "Too many open files" in made.statuses()[0].reason)
    monkeypatch.undo()
    file.write_text("fine")
    await until_ready(made, "one")


async def test_a_number_beyond_64_bits_is_named_with_its_key(host) -> None:
    made = host([PluginTable(name="one", plugin="g", settings={"speed": [2**64]})], g="Good")
    seen = await opened(made)
    assert seen["one"][0] is PluginState.FAILED
    assert [problem.where for problem in made.problems()] == ["plugins.one.speed.0"]


async def test_a_hung_call_does_not_hold_up_the_end(host, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(plugin_instance, "CLOSE_TIMEOUT_S", 0.1)
    table, file = scripted(tmp_path)
    made = host([table], Scripted="Scripted", call_timeout_s=600)
    await opened(made)
    file.write_text("hang")
    instance = made._instances["one"]
    async with asyncio.timeout(10):
        while not instance._process._turn.locked():
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


async def test_a_process_that_cannot_be_killed_is_left_behind_and_never_a_third(
    host, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(plugin_process, "KILL_PATIENCE_S", 0.2)
    monkeypatch.setattr(plugin_instance, "FIRST_PAUSE_S", 0.1)
    table, file = scripted(tmp_path)
    made = host([table], Scripted="Scripted", two="Good", call_timeout_s=0.5)
    pids = []
    for _ in range(2):
        await (until_ready(made, "one") if pids else opened(made))
        pids.append(pid_of(made, "one"))
        hold(pids[-1])
        file.write_text("hang")
        await until(made, "one", lambda: states(made)["one"] is PluginState.FAILED)
        reason = made.statuses()[0].reason
        assert f"process {pids[-1]} cannot be killed, left behind; next try in" in reason
        file.write_text("fine")
    await until(made, "one", lambda: made.statuses()[0].reason.startswith("its processes"))
    assert f"its processes {pids[0]}, {pids[1]} cannot be killed" in made.statuses()[0].reason
    assert states(made)["two"] is PluginState.READY
    for pid in pids:
        let_go(pid)
    await until_ready(made, "one")


async def test_a_change_of_health_is_seen_without_being_told(host, tmp_path) -> None:
    table, file = scripted(tmp_path)
    made = host([table], Scripted="Scripted")
    await opened(made)
    file.write_text("sick")
    await until(made, "one", lambda: made.listings()[0].devices[0].reason == "it coughs")


async def test_a_plugin_that_has_events_is_listed_at_once(host, tmp_path, monkeypatch) -> None:
    table, file = scripted(tmp_path, "TellsOfChanges")
    made = host([table], TellsOfChanges="TellsOfChanges")
    made._instances["one"]._pace = Pace(health_interval_s=3600)
    await opened(made)
    file.write_text("none")
    await until(made, "one", lambda: made.listings()[0].devices == ())


async def test_plugins_hear_of_their_kernels_in_order(host, tmp_path) -> None:
    file = tmp_path / "heard"
    made = host([PluginTable(name="one", plugin="h", settings={"file": str(file)})], h="Hears")
    await opened(made)
    for step in ("before-create", "after-start"):
        made.notify(step, "k1", given("one"))
    await made.container_edits(given("one"), PROCESS)
    assert file.read_text() == "before-create k1 one0\nafter-start k1 one0\n"


async def test_what_a_plugin_prints_goes_to_the_log_under_its_name_and_is_bounded(
    host, capsys
) -> None:
    with capture_logs() as logged:
        made = host(loud="Prints")
        await opened(made)
        await made.close()
    lines = [entry for entry in logged if entry["event"] == "plugin.printed"]
    assert {entry["plugin"] for entry in lines} == {"loud"}
    assert lines[0]["text"] == "to standard output"
    assert 10 < len(lines) <= 50


def test_sim_is_installed_as_its_own_distribution() -> None:
    assert installed()["sim"].value == "agentd_sim:SimPlugin"

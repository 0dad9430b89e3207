from pathlib import Path

import pytest
from importlib_metadata import EntryPoint

from agentd.config.plugins import PluginTable
from agentd.errors import PluginUnavailable
from agentd.pluginhost.process import PluginProcess
from agentd.services.protocols import PluginState
from pluginhost.rig import PROCESS, Hosts, given, opened, point, scripted, states, until


async def test_an_installed_plugin_loads_by_itself_under_its_own_name(host) -> None:
    made = host(good=("Good"), table_only="NeedsTable")
    assert await opened(made) == {"good": (PluginState.READY, "")}
    (listing,) = made.listings()
    assert [slot.name for slot in listing.slot_types] == ["good.device"]
    assert listing.devices[0].device_id == ("good", "good0")


async def test_entry_point_serves_several_tables(host) -> None:
    tables = [
        PluginTable(name="cuda", plugin="good", settings={"speed": 1}),
        PluginTable(name="good", plugin="good"),
    ]
    made = host(tables, good="Good")
    assert set(await opened(made)) == {"cuda", "good"}
    assert [listing.name for listing in made.listings()] == ["cuda", "good"]


async def test_plugin_that_needs_a_table_is_started_for_it_alone(host, monkeypatch) -> None:
    started: list[str] = []
    start = PluginProcess.start

    async def counted(name: str, *arguments: object) -> PluginProcess:
        started.append(name)
        return await start(name, *arguments)

    monkeypatch.setattr(PluginProcess, "start", counted)
    made = host([PluginTable(name="x", plugin="table_only")], table_only="NeedsTable")
    assert await opened(made) == {"x": (PluginState.READY, "")}
    assert started == ["x"]
    without = next(s for s in made.statuses(everything=True) if s.name == "table_only")
    assert (without.state, without.reason[:22]) == (PluginState.BLOCKED, "needs a table of its o")


async def test_plugin_without_a_table_outlives_a_failed_table(host) -> None:
    tables = [PluginTable(name="x", plugin="good", settings={"sped": 1})]
    made = host(tables, good="Good")
    seen = await opened(made)
    assert seen["x"][0] is not PluginState.READY
    assert seen["good"] == (PluginState.READY, "")


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
        ("NotAPlugin", "is not an AcceleratorPlugin"),
        ("OldApi", "unsupported plugin API: got 0, expected 1"),
        ("RaisesAtOpen", "open: RuntimeError: no driver here"),
        ("ExitsAtOpen", "open: SystemExit: 3"),
        ("StopsIteration", "open: StopIteration"),
        ("RaisesAtList", "list: OSError: device lost"),
        ("OutsidePrefix", "slot 'cpu' is outside the prefix 'bad'"),
        ("NegativeAmount", "invalid capacity of d0: '-1' is negative"),
        ("NanAmount", "not finite"),
        ("HugeAmount", "exceeds the maximum"),
        ("HalfUnique", "a unique slot is indivisible"),
        ("OddId", "invalid id 'a/b c'"),
        ("UnknownSlot", "has the unlisted slot type 'x.y'"),
        ("BadHealth", "invalid health of d0: 'so-so'"),
        ("Twice", "duplicate id bad0"),
        ("OddParent", "Expected `str | null`, got `int` - at `$.devices[0].parent`"),
        ("OddAliases", "Expected `array`, got `str` - at `$.devices[0].aliases`"),
        ("OddNode", "invalid NUMA node of d0: -1"),
        ("OddEdits", "Expected `str`, got `int`"),
        ("ListsNonsense", "Expected `object`, got `str` - at `$.devices[0]`"),
        ("CrashesAtOpen", "open: killed by SIGSEGV"),
        ("LeavesAtOpen", "open: exited with status 7"),
        ("ClosesEverything", "open: "),
    ],
)
async def test_a_plugin_that_misbehaves_is_reported_and_left_out(
    host, target: str, why: str
) -> None:
    made = host(good="Good", bad=target)
    seen = await opened(made)
    assert seen["good"][0] is PluginState.READY
    is_mended_by_time = "At" in target or target in {
        "Missing",
        "StopsIteration",
        "ClosesEverything",
    }
    assert seen["bad"][0] is (PluginState.PENDING if is_mended_by_time else PluginState.FAILED)
    assert why in seen["bad"][1]
    assert [listing.name for listing in made.listings()] == ["good"]


@pytest.mark.parametrize(
    ("source", "state", "why"),
    [
        ("1 / 0", PluginState.PENDING, "import: ZeroDivisionError: division by zero"),
        ("import nothing_of_this_name", PluginState.PENDING, "import: ModuleNotFoundError"),
        ("def", PluginState.PENDING, "import: SyntaxError"),
        ("import os; os._exit(4)", PluginState.PENDING, "import: exited with status 4"),
        ("import os; os.abort()", PluginState.PENDING, "import: killed by SIGABRT"),
        ("import sys; sys.exit()", PluginState.PENDING, "import: SystemExit"),
        ("import time; time.sleep(1000)", PluginState.PENDING, "not open within 2 s"),
        ("print(1); from support.faulty_plugins import Good as Plugin", PluginState.READY, ""),
    ],
)
async def test_a_module_that_misbehaves_at_import_harms_nothing(
    host, tmp_path, monkeypatch, source, state, why
) -> None:
    (tmp_path / "odd.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint("bad", "odd:Plugin", "agentd.accelerators"), point("good", "Good")]
    seen = await opened(host(points=points), 2)
    assert seen["good"][0] is PluginState.READY
    assert seen["bad"][0] is state
    assert seen["bad"][1].startswith(why)


@pytest.mark.parametrize("target", ["Late", "ListsSlowly", "MadeSlowly"])
async def test_late_plugin_is_added_after_readiness(
    host: Hosts, tmp_path: Path, target: str
) -> None:
    file = tmp_path / "go"
    table = PluginTable(name="late", plugin="late", settings={"file": str(file)})
    made = host([table], late=target)
    assert await opened(made, 0.5) == {"late": (PluginState.PENDING, "not open within 0.5 s")}
    file.touch()
    await until(made, lambda: states(made)["late"] is PluginState.READY)
    assert [listing.name for listing in made.listings()] == ["late"]


async def test_edits_give_allocated_devices_and_hide_others(host) -> None:
    made = host(one="Good", two="Good")
    await opened(made)
    assert (await made.container_edits(given("one"), PROCESS)).env == {"ONE": "one0", "TWO": ""}
    assert (await made.container_edits(given(), PROCESS)).env == {"ONE": "", "TWO": ""}


async def test_edits_beyond_their_bounds_are_the_plugin_s_fault(host, tmp_path) -> None:
    table, file = scripted(tmp_path)
    made = host([table], Scripted="Scripted")
    await opened(made)
    for word, why in (("groups", "invalid group"), ("env", "invalid variable 'X'")):
        file.write_text(word)
        with pytest.raises(PluginUnavailable, match=f"plugin one .* {why}"):
            await made.container_edits(given("one"), PROCESS)


async def test_a_plugin_whose_supervision_ends_is_failed_and_says_so(host, monkeypatch) -> None:
    made = host(good=("Good"))

    async def dies() -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(made._instances["good"], "run", dies)
    why = "supervision ended (RuntimeError: killed); restart agentd"
    assert await opened(made) == {"good": (PluginState.FAILED, why)}

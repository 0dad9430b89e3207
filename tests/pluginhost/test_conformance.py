import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentd import plugin_api
from agentd.pluginhost.conformance import Conformance, find_missing_files
from agentd.pluginhost.instance import PluginSpec, PluginTimeouts
from agentd.pluginhost.validation import validate_listing

PAGE = Path(__file__).parents[2] / "docs" / "plugins" / "write-a-plugin.md"


async def failures(target: str, **settings) -> dict[str, str]:
    wanted = PluginSpec("one", "one", f"support.faulty_plugins:{target}", settings)
    findings = await Conformance(wanted, PluginTimeouts(call_timeout_s=1)).run()
    return {finding.check: finding.detail for finding in findings if not finding.passed}


@pytest.mark.parametrize("target", ["Good", "Deals"])
async def test_a_good_plugin_passes_every_check(target: str) -> None:
    assert await failures(target) == {}


@pytest.mark.parametrize(
    ("target", "check", "why"),
    [
        ("Missing", "it is imported", "AttributeError"),
        ("OldApi", "it is imported", "unsupported plugin API: got 0"),
        ("RaisesAtOpen", "it opens", "no driver here"),
        ("CrashesAtOpen", "it opens", "SIGSEGV"),
        ("OutsidePrefix", "it lists slots and devices", "outside the prefix"),
        ("ListsNonsense", "it lists slots and devices", "Expected `object`, got `str`"),
        ("Moves", "ids are the same in two listings", "S-one"),
        ("OddEdits", "it says how to hide its devices", "Expected `str`, got `int`"),
        ("MovesSlots", "slot types are the same in two listings", "they are others"),
        ("DealsByOrder", "it deals the same way in another order", "S-one0, S-one4"),
        ("Deaf", "it hears of kernels", "RuntimeError: not now"),
        ("NeverClears", "it clears what waits for a clear", "one0 needs_clear"),
        ("LooksInside", "it imports agentd.plugin_api alone", "agentd.core.kernel.reconcile"),
    ],
)
async def test_what_fails_is_named_with_the_reason(target: str, check: str, why: str) -> None:
    assert why in (await failures(target))[check]


async def test_wrong_settings_fail() -> None:
    assert await failures("Good", sped=1) == {"its settings are valid": "sped: unknown key"}


def test_the_command_prints_what_fails_and_says_so_in_its_status(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"

    def check(extra: str) -> subprocess.CompletedProcess[str]:
        config.write_text(f'[plugins.npu]\nplugin = "sim"\ncount = 2\n{extra}')
        command = [sys.executable, "-m", "agentd", "plugin", "check", "npu", "--json"]
        return subprocess.run(
            [*command, "--config", config], capture_output=True, text=True, check=False
        )

    good = check("")
    assert good.returncode == 0
    assert all(row["passed"] for row in json.loads(good.stdout))
    bad = check('lie = "negative"\n')
    assert bad.returncode == 1
    assert "is negative" in json.loads(bad.stdout)[-1]["detail"]


async def test_the_plugin_of_the_how_to_is_one(tmp_path: Path, monkeypatch) -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "7").symlink_to("/dev/null")
    text = code[1].replace('"/dev/blinker")', f'"{tmp_path}/dev")', 1)
    (tmp_path / "blinker.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    wanted = PluginSpec("blinker", "blinker", "blinker:Blinker", {})
    findings = await Conformance(wanted, PluginTimeouts()).run()
    assert [finding for finding in findings if not finding.passed] == []
    assert len(findings) >= 9


def test_excerpts_of_the_how_to_do_what_it_says() -> None:
    excerpts = re.findall(r"```python\n# excerpt\n(.*?)```", PAGE.read_text(), re.DOTALL)
    members: dict = {}
    for excerpt in excerpts:
        exec(excerpt, members)  # noqa: S102 - the page is ours
    plugin = SimpleNamespace(name="blinker")
    listing = validate_listing(
        "blinker", members["slot_types"](plugin), members["list_devices"](plugin)
    )
    assert [device.slot_names for device in listing.devices] == [("blinker.shares", "blinker.mem")]
    boards = [
        plugin_api.DeviceInfo(f"b{n}", f"B{n}", "blinker.shares", attributes={"board": board})
        for n, board in enumerate("xyyx")
    ]
    dealt = members["partition"](plugin, boards, ["a", "b"])
    assert dealt == plugin_api.PartitionInfo({"a": ["b0", "b3"], "b": ["b1", "b2"]})


def test_excerpt_about_refusals_lists_the_other_devices() -> None:
    excerpts = re.findall(r"```python\n# excerpt\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (excerpt,) = (text for text in excerpts if "DeviceReads(" in text)

    def uuid(index: int) -> str:
        if index == 1:
            raise ArithmeticError("GPU is lost")
        return f"GPU-{index}"

    vendor = SimpleNamespace(
        Error=ArithmeticError, init=lambda: None, count=lambda: 3, uuid=uuid, measure=uuid,
        model=str, memory=str,
    )  # fmt: skip
    members: dict = {"vendor": vendor}
    exec(excerpt, members)  # noqa: S102 - the page is ours
    plugin = SimpleNamespace(name="vendor")
    members["open"](plugin)
    listed = [(d.stable_id, d.health) for d in members["list_devices"](plugin)]
    assert listed == [("GPU-0", "healthy"), ("GPU-2", "healthy")]
    assert members["measure"](plugin) == ["GPU-0", "GPU-2"]
    (condition,) = members["conditions"](plugin)
    assert condition.reason == "GPU 1 does not answer: GPU is lost"


def test_missing_device_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    edits = plugin_api.ContainerEdits(
        device_nodes=tuple(
            plugin_api.DeviceNode(path, path)
            for path in ("/dev/null", f"{tmp_path}/gone", f"{tmp_path}/file")
        ),
        mounts=(plugin_api.Mount(f"{tmp_path}/lib", "/lib"), plugin_api.Mount("/usr", "/usr")),
    )
    assert [*find_missing_files(edits)] == [
        f"{tmp_path}/gone: No such file or directory",
        f"{tmp_path}/file: not a device",
        f"{tmp_path}/lib: No such file or directory",
    ]


def test_everything_of_the_plugin_api_is_documented() -> None:
    page = PAGE.read_text()
    for name in plugin_api.__all__:
        value = getattr(plugin_api, name)
        if isinstance(value, type) and value.__module__ == plugin_api.__name__:
            assert value.__doc__, name
    plugin = plugin_api.AcceleratorPlugin
    for name, method in vars(plugin).items():
        if not name.startswith("_") and callable(getattr(plugin, name)):
            function = getattr(method, "__func__", method)
            assert function.__doc__, name
            assert f"`{name}(" in page, name

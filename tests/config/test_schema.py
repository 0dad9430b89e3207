"""The JSON Schema of agent.toml agrees with what agentd reads."""

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import agentd_cuda
import agentd_generic
import agentd_rocm
import agentd_sim
from agentd.config.loading import load_text
from agentd.config.schema import PACKAGED, schema_text, settings_schema
from agentd.errors import ConfigRefused
from agentd.pluginhost.entry_points import EntryPoint, installed_entry_points, settings_schemas

ROOT = Path(__file__).parents[2]
PLUGINS = settings_schemas(installed_entry_points())
WHOLE = settings_schema(PLUGINS)


def is_valid(schema: dict[str, Any], text: str) -> bool:
    return jsonschema.Draft7Validator(schema).is_valid(tomllib.loads(text))


def is_read(text: str) -> bool:
    try:
        load_text(text, None, {})
    except ConfigRefused:
        return False
    return True


def test_packaged_schema_is_that_of_the_settings() -> None:
    assert PACKAGED.read_text() == schema_text({}), "run python docs/generate.py"
    jsonschema.Draft7Validator.check_schema(settings_schema({}))
    jsonschema.Draft7Validator.check_schema(WHOLE)


@pytest.mark.parametrize("name", ["agent.toml", "dev.toml"])
def test_shipped_configuration_fits_the_schema(name: str) -> None:
    text = (ROOT / "configs" / name).read_text()
    assert is_valid(WHOLE, text)
    assert is_valid(settings_schema({}), text)


@pytest.mark.parametrize(
    "text",
    [
        '[node]\nid = "node-1"\nkeep-ended = 5',
        '[node]\nid = "-"',
        "[node]\nkeep_ended = 5",
        "[node]\nkeep-ended = -1",
        '[node]\nruntime = "podman"',
        '[host]\nmem = "512m"\ncpus = 4',
        "[host]\nmem = 512000000",
        "[host]\ncpus = 0",
        '[resource]\nreserved-cpu = ["0", "1"]\nreserved-mem = "1g"\nallocation-mode = "manual"',
        "[resource]\nreserved-cpu = 1\ndefault-slots = { cpu = 1, mem = '1g' }",
        '[resource]\nallocation-mode = "mine"',
        '[runtime.docker]\nlog-max-size = "10m"\nulimits = { nofile = 1024 }',
        "[runtime.docker]\nlog-max-files = 0",
        "[runtime.nothing]\na = 1",
        '[[agents]]\nid = "a"\nresource.devices = { cuda = ["cuda0"] }',
        '[[agents]]\nuser = "nobody"',
        f'[[agents]]\nid = "{"a" * 49}"',
        '[[rpc.tokens]]\nname = "a"\nfile = "/t"\nrole = "admin"',
        '[[rpc.tokens]]\nname = "a"\nfile = "/t"\nrole = "root"',
        "[plugins]\nopen-timeout = 0",
        "[plugins]\nopen_timeout = 3",
        '[plugins]\nallow = ["cuda"]',
        "[plugins.Bar]\nx = 1",
        '[plugins.tpu]\nplugin = "of-somebody"\nanything = [1]',
        "[plugins.tpu]\nplugin = 3",
        "[plugins.tpu]\nrequired = 'yes'",
        "[plugins.tpu]\nexclude = 'tpu0'",
        "[metrics]\nper-kernel = false",
    ],
)
def test_schema_and_settings_agree(text: str) -> None:
    assert is_valid(WHOLE, text) == is_valid(settings_schema({}), text) == is_read(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[plugins.sim]\ncount = 2\nmode = "shares"', True),
        ("[plugins.sim]\ncuont = 2", False),
        ('[plugins.npu]\nplugin = "sim"\ncount = 2\nrequired = true', True),
        ('[plugins.npu]\nplugin = "sim"\ncount = 2\nexclude = ["npu0"]', True),
        ('[plugins.npu]\nplugin = "sim"\ncuont = 2', False),
        ('[plugins.cuda]\nmode = "whole"', False),
        ('[plugins.cuda]\nplugin = "sim"\ncount = 4', True),
        ('[plugins.cuda]\nplugin = "sim"\nignored-xids = [13]', False),
        ("[plugins.npu]\nwhatever = 2", True),
    ],
)
def test_table_of_a_plugin_has_the_schema_of_its_entry_point(text: str, expected: bool) -> None:
    assert is_valid(WHOLE, text) == expected
    assert is_valid(settings_schema({}), text)


@pytest.mark.parametrize(
    ("name", "plugin"),
    [
        ("cuda", agentd_cuda.CudaPlugin),
        ("generic", agentd_generic.GenericPlugin),
        ("rocm", agentd_rocm.RocmPlugin),
        ("sim", agentd_sim.SimPlugin),
    ],
)
def test_plugin_takes_the_keys_of_its_schema(name: str, plugin: Any) -> None:
    (unknown,) = [
        problem.why for problem in plugin.validate({"no-such-key": 1}) if "no-such" in problem.key
    ]
    allowed = unknown.partition("allowed: ")[2].split(", ")
    assert sorted(allowed) == sorted(
        {*PLUGINS[name]["properties"], "plugin", "required", "exclude"}
    )


def test_schema_of_a_plugin_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "explosive_plugin"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        EntryPoint("a", "explosive_plugin.below:Plugin", "agentd.accelerators"),
        EntryPoint("b", "not_installed:Plugin", "agentd.accelerators"),
    ]
    assert settings_schemas(points) == {}
    (package / "settings.schema.json").write_text(json.dumps({"properties": {"x": {}}}))
    assert settings_schemas(points) == {"a": {"properties": {"x": {}}}}

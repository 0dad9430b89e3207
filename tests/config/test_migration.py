"""Older, slot-based configurations: recognised, explained, and brought into today's form."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomlkit
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from agentd.cli.agentd.main import agentd
from agentd.config.loading import load_text
from agentd.config.migration import migrated
from agentd.core.partition.rules import AllocationMode
from agentd.errors import ConfigRefused

BEFORE = """
[etcd]
namespace = "local"
[agent]
id = "i-gpu1"
rpc-listen-addr = { host = "", port = 6011 }
[agent.resource.allocations]
cpu = 4
mem = "16G"
devices = { "cuda.mem" = 0.5, "cuda.shares" = 0.50 }
[resource]
reserved-cpu = 1
reserved-mem = "1G"
reserved-disk = "8G"
affinity-policy = "PREFER_SINGLE_NODE"
allocation-mode = "manual"
"""
AFTER = """
[resource]
allocation-mode = "manual"
[[agents]]
[agents.agent]
id = "agent-1"
[agents.resource]
cpu = ["0", "1"]
mem = "32G"
devices = { cuda = ["cuda0", "cuda1"] }
[[agents]]
[agents.agent]
id = "agent-2"
[agents.resource]
cpu = ["2", "3"]
mem = "32G"
devices = { cuda = ["cuda2"] }
"""
EACH = """
[agent.resource.allocations]
mem = "8g"
[[agents]]
[agents.agent]
id = "a"
[agents.resource.allocations]
devices = { "cuda.shares" = 0.5, "rocm.device" = 2 }
[[agents]]
id = "b"
[agents.resource]
devices = { cuda.shares = 1.5 }
"""


def new(text: str) -> dict:
    """Today's form of a file, which has to be one that can be used."""
    found = migrated(text, Path("old.toml"))
    load_text(found, None, {})
    return tomllib.loads(found)


def test_half_of_the_shares_becomes_a_limit_in_shared_mode() -> None:
    text = migrated(BEFORE, Path("old.toml"))
    assert tomllib.loads(text) == {
        "resource": {
            "allocation-mode": "shared",
            "reserved-cpu": 1,
            "reserved-mem": "1G",
            "affinity-policy": "prefer-single-node",
        },
        "agents": [{"id": "i-gpu1", "resource": {"limits": {"cpu": 4, "mem": "16G", "cuda": 0.5}}}],
        "plugins": {"cuda": {"mode": "shares", "memory-slot": True}},
    }
    assert "cuda = 0.50 }" in text, "as it was written"
    settings = load_text(text, None, {}).settings
    assert settings.resource.allocation_mode is AllocationMode.SHARED


def test_keys_without_equivalent_become_comments() -> None:
    text = migrated(BEFORE, Path("old.toml"))
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert "# [etcd] namespace" in comments
    assert "# [agent] rpc-listen-addr" in comments
    assert "# [resource] reserved-disk" in comments
    assert any('"cuda.mem" = 0.5: not divisible by itself' in line for line in comments)
    assert any("which requires shared mode" in line for line in comments)


def test_devices_stay_devices_in_manual_mode() -> None:
    found = new(AFTER)
    assert found["resource"] == {"allocation-mode": "manual"}
    assert [agent["id"] for agent in found["agents"]] == ["agent-1", "agent-2"]
    assert found["agents"][1]["resource"] == {
        "cpu": ["2", "3"],
        "mem": "32G",
        "devices": {"cuda": ["cuda2"]},
    }


def test_agents_inherit_the_common_amounts() -> None:
    found = new(EACH)
    assert found["agents"] == [
        {"id": "a", "resource": {"limits": {"mem": "8g", "cuda": 0.5, "rocm": 2}}},
        {"id": "b", "resource": {"limits": {"mem": "8g", "cuda": 1.5, "rocm": 0}}},
    ]


def test_a_fraction_turns_the_whole_file_into_shared_mode() -> None:
    text = migrated(
        """
[[agents]]
id = "half"
[agents.resource.allocations]
cpu = "0-3"
devices = { "cuda.shares" = 0.5, "cuda.mem" = 0.5 }
[[agents]]
id = "lists"
[agents.resource.allocations]
cpu = ["4", "5"]
devices = { cuda = ["cuda1", "cuda2"], rocm = "all" }
[[agents]]
id = "rest"
[agents.resource.allocations]
cpu = 2
""",
        Path("old.toml"),
    )
    load_text(text, None, {})
    found = tomllib.loads(text)
    assert found["resource"]["allocation-mode"] == "shared"
    assert {agent["id"]: agent["resource"] for agent in found["agents"]} == {
        "half": {"limits": {"cpu": 4, "cuda": 0.5, "rocm": 0}},
        "lists": {"limits": {"cpu": 2, "cuda": 2, "rocm": "100%"}},
        "rest": {"limits": {"cpu": 2, "cuda": 0, "rocm": 0}},
    }
    first = " ".join(text.partition("\n\n")[0].replace("#", "").split())
    assert "The file gave an agent a fraction of a device." in first
    assert "the whole file is in shared mode now" in first
    assert "Lists of cores and devices are lost by it." in first


def test_fraction_of_the_memory_alone_becomes_a_limit() -> None:
    found = new("""
[[agents]]
id = "memory"
[agents.resource.allocations]
devices = { "cuda.mem" = 0.5 }
[[agents]]
id = "shares"
[agents.resource.allocations]
devices = { "cuda.shares" = "0.25", "rocm.vram" = 1.5 }
""")
    assert {agent["id"]: agent["resource"] for agent in found["agents"]} == {
        "memory": {"limits": {"cuda": 0.5, "rocm": 0}},
        "shares": {"limits": {"cuda": "0.25", "rocm": 1.5}},
    }
    assert found["resource"] == {"allocation-mode": "shared"}
    assert found["plugins"] == {
        "cuda": {"mode": "shares", "memory-slot": True},
        "rocm": {"mode": "shares"},
    }


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ('{ "cuda.smp" = 1 }', {"devices": {"cuda": 1}}),
        ('{ "cuda.mem" = "2/1" }', {"devices": {"cuda": 2}}),
        ('{ "cuda.mem" = 0, "cuda.smp" = 0.5 }', {"limits": {"cuda": 0.5}}),
        ('{ "cuda.smp" = 0.25, "cuda.mem" = 0.5 }', {"limits": {"cuda": 0.5}}),
    ],
)
def test_largest_number_of_any_property_counts(devices: str, expected: object) -> None:
    found = new(f"[agent.resource.allocations]\ndevices = {devices}\n")
    assert found["agents"][0]["resource"] == expected
    is_whole = "devices" in expected
    assert ("mode" in found.get("plugins", {}).get("cuda", {})) is not is_whole


@pytest.mark.parametrize("written", ['"40g"', "17179869184"])
def test_bytes_of_device_memory_become_a_limit_to_set(written: str) -> None:
    text = f"""
[agent.resource.allocations]
devices = {{ "cuda.mem" = {written} }}
"""
    assert new(text)["agents"][0]["resource"] == {"limits": {"cuda": 0}}
    comment = f'# "cuda.mem" = {written}: not a number of devices; set the limit of cuda'
    assert comment in migrated(text, Path("old.toml"))


def test_plugin_without_shares_keeps_its_table(tmp_path: Path) -> None:
    text = """
[plugins.tpu]
plugin = "generic"
devices = ["/dev/accel*"]
[agent.resource.allocations]
devices = { "tpu.shares" = 0.5 }
"""
    assert new(text)["plugins"] == {"tpu": {"plugin": "generic", "devices": ["/dev/accel*"]}}
    assert "# agents had parts of tpu" in migrated(text, Path("old.toml"))
    (tmp_path / "new.toml").write_text(migrated(text, Path("old.toml")))
    command = ["check-config", "--config", str(tmp_path / "new.toml")]
    run = subprocess.run(
        [sys.executable, "-m", "agentd", *command],
        env={
            **os.environ,
            "AGENTD__NODE__STATE_DIR": str(tmp_path / "state"),
            "AGENTD__RPC__SOCKET": str(tmp_path / "agentd.sock"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


_AMOUNTS = st.one_of(
    st.integers(0, 8),
    st.decimals(0, 8, places=2).map(float),
    st.sampled_from(["0.5", "40g", "25%", 2**35]),
)
_SLOTS = st.sampled_from(["cuda.shares", "cuda.mem", "cuda.device", "rocm.mem", "rocm.vram"])
_ALLOCATIONS = st.dictionaries(_SLOTS, _AMOUNTS, max_size=4)


@given(st.lists(_ALLOCATIONS, min_size=1, max_size=4))
def test_divided_file_limits_every_agent_and_device(allocations: list[dict]) -> None:
    agents = [
        {"id": f"a{number}", "resource": {"allocations": {"devices": amounts}}}
        for number, amounts in enumerate(allocations)
    ]
    text = tomlkit.dumps({"agents": agents})
    found = new(text)
    names = {slot.partition(".")[0] for amounts in allocations for slot in amounts}
    if found["resource"].get("allocation-mode") == "shared":
        for agent in found["agents"]:
            assert agent["resource"]["limits"].keys() == names
    else:
        for agent, amounts in zip(found["agents"], allocations, strict=True):
            owned = agent.get("resource", {}).get("devices", {})
            assert owned.keys() == {slot.partition(".")[0] for slot in amounts}
            assert all(isinstance(amount, int) for amount in owned.values())


def test_whole_devices_stay_the_agent_s_own() -> None:
    text = """
[[agents]]
id = "a"
[agents.resource.allocations]
mem = "8g"
devices = { "cuda.shares" = 2.0, "cuda.mem" = 2 }
[[agents]]
id = "b"
[agents.resource.allocations]
devices = { "cuda.shares" = "1", rocm = ["rocm0"] }
"""
    found = new(text)
    assert found["resource"] == {"allocation-mode": "manual"}
    assert [agent["resource"] for agent in found["agents"]] == [
        {"mem": "8g", "devices": {"cuda": 2}},
        {"devices": {"cuda": 1, "rocm": ["rocm0"]}},
    ]
    assert found["plugins"] == {"cuda": {"mode": "shares", "memory-slot": True}}
    assert "shared mode" not in migrated(text, Path("old.toml"))


def test_lists_beside_amounts_become_limits() -> None:
    found = migrated(
        """
[agent.resource.allocations]
cpu = ["0", "1", "2"]
devices = { "cuda.shares" = 0.5, rocm = ["rocm0"] }
""",
        Path("old.toml"),
    )
    limits = tomllib.loads(found)["agents"][0]["resource"]["limits"]
    assert limits == {"cpu": 3, "cuda": 0.5, "rocm": 1}
    assert '# cpu = ["0", "1", "2"]: now a number' in found
    assert '# devices = { rocm = ["rocm0"] }: agents own no devices in shared mode' in found


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (BEFORE, "agent"),
        (AFTER, "agents.1.agent"),
        (EACH, "agents.0.resource.allocations"),
    ],
)
def test_an_older_file_is_refused_with_the_lines_to_write(text: str, where: str) -> None:
    with pytest.raises(ConfigRefused) as refused:
        load_text(text, Path("old.toml"), {})
    why = next(problem.why for problem in refused.value.problems if problem.where == where)
    assert "belongs to an older form" in why
    wanted = {
        "agent": "cuda = 0.50",
        "agents.1.agent": 'cuda = ["cuda2"]',
        "agents.0.resource.allocations": "see agents.0.agent",
    }
    assert wanted.get(where, 'allocation-mode = "shared"') in why
    assert ("agentd config migrate" in why) != ("see " in why)
    assert "; [" not in why
    assert "did you mean" not in why


def test_migrated_file_starts_a_daemon(tmp_path: Path) -> None:
    """With simulated GPUs that offer what the file asks for."""
    text = migrated(BEFORE, Path("old.toml"))
    simulated = '[plugins.cuda]\nplugin = "sim"\ncount = 2\nmemory = "80g"'
    text = text.replace("[plugins.cuda]", simulated)
    (tmp_path / "new.toml").write_text(f'{text}[host]\ncpus = 8\nmem = "32g"\n')
    command = ["plan", "--json", "--config", str(tmp_path / "new.toml")]
    run = subprocess.run(
        [sys.executable, "-m", "agentd", *command], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    limits = json.loads(run.stdout)["agents"]["i-gpu1"]["limits"]
    assert limits["cuda"] == {"limit": "0.5", "guaranteed": True}


def test_sections_of_today_stay_and_unknown_keys_are_told() -> None:
    text = migrated(
        """
[node]
id = "n"
[plugins.cuda]
ignored-xids = [13]
[plugins.tpu]
plugin = "generic"
devices = ["/dev/accel*"]
[agent.resource]
foo = { a = { b = 0.5 } }
[agent.resource.allocations]
cpu = "0-3"
devices = { cuda = { mem = { rpc = 1 }, shares = 0.5 } }
""",
        Path("old.toml"),
    )
    found = tomllib.loads(text)
    assert found["node"] == {"id": "n"}
    assert found["plugins"]["tpu"]["devices"] == ["/dev/accel*"]
    assert found["plugins"]["cuda"] == {
        "ignored-xids": [13],
        "mode": "shares",
        "memory-slot": True,
    }
    assert "# foo = { a = { b = 0.5 } }: agents have no such setting" in text
    assert '# cpu = "0-3": now a number' in text
    assert '# "cuda.mem" = { rpc = 1 }: not divisible by itself' in text


def test_unknown_key_of_todays_form_is_explained() -> None:
    with pytest.raises(ConfigRefused) as refused:
        load_text('[[agents]]\nid = "a"\nagent = "alpha"\n', None, {})
    assert "unknown key" in str(refused.value)


def test_a_file_of_today_is_not_migrated() -> None:
    for text in ("", '[[agents]]\nid = "a"\n', '[agents]\nid = "a"\n', "agent = 1\n"):
        with pytest.raises(ConfigRefused, match="not of an older form"):
            migrated(text, Path("new.toml"))


@pytest.mark.parametrize("text", ["[agent", "a = 1\na = 2", "\0"])
def test_invalid_toml_is_not_migrated(text: str) -> None:
    with pytest.raises(ConfigRefused, match="invalid TOML"):
        migrated(text, Path("old.toml"))


def test_nothing_in_the_file_gets_out_of_its_comment() -> None:
    found = migrated('[agent]\n"x\\n[rpc]\\nlisten" = 1\n["a\\n[node]"]\nb = 1\n', Path("old.toml"))
    assert set(tomllib.loads(found)) == {"resource", "agents"}


def test_the_command_prints_or_writes(tmp_path: Path) -> None:
    old, output = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text(BEFORE)
    run = CliRunner().invoke
    printed = run(agentd, ["config", "migrate", str(old)])
    assert (printed.exit_code, "cuda = 0.50" in printed.output) == (0, True)
    assert run(agentd, ["config", "migrate", str(old), "--output", str(output)]).exit_code == 0
    assert output.read_text() == printed.output
    again = run(agentd, ["config", "migrate", str(old), "--output", str(output)])
    assert (again.exit_code, "replace it with --force" in again.output) == (1, True)
    refused = run(agentd, ["config", "migrate", str(output)])
    assert (refused.exit_code, "not of an older form" in refused.output) == (78, True)


def test_unusable_migration_is_reported_not_written(tmp_path: Path) -> None:
    old, output = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text('[agent]\nid = "no name"\n[agent.resource.allocations]\nmem = "lots"\n')
    result = CliRunner().invoke(agentd, ["config", "migrate", str(old), "--output", str(output)])
    assert result.exit_code == 78
    assert "agents.0.id" in result.output
    assert not output.exists()

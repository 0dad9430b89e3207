import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from agentd.config.default_file import default_text
from agentd.config.document import with_setting, without_token, write_file
from agentd.config.loading import find_config, load, load_text
from agentd.config.settings import Settings
from agentd.core.partition.rules import AllocationMode
from agentd.errors import ConfigRefused

ROOT = Path(__file__).parents[2]
FILE = Path("agent.toml")


def read(text: str, environ: dict[str, str] | None = None, monkeypatch=None) -> Settings:
    return load_text(text, FILE, environ or {}).settings


def refusal(text: str) -> list[str]:
    with pytest.raises(ConfigRefused) as caught:
        read(text)
    return caught.value.lines()


def test_default_file_has_every_key_with_its_meaning() -> None:
    shown: dict[str, str] = {}
    table = ""
    for line in default_text().splitlines():
        if heading := re.match(r"\[([a-z.]+)\]", line):
            table = heading[1]
        elif table and (found := re.fullmatch(r"(?:# )?([a-z-]+) = .*?  # (.*)", line)):
            shown.setdefault(f"{table}.{found[1]}", found[2])
    assert read(default_text()) == Settings()
    assert described(Settings) == {key: shown.get(key) for key in described(Settings)}


def described(model: type[BaseModel], path: str = "") -> dict[str, str | None]:
    """Return the description of each key that is not a list of tables."""
    found: dict[str, str | None] = {}
    for name, field in model.model_fields.items():
        key = f"{path}{field.alias or name}"
        if isinstance(field.default, BaseModel):
            found |= described(type(field.default), f"{key}.")
        elif field.description:
            found[key] = field.description
    return found


def test_default_file_names_the_proposed_runtime() -> None:
    assert read(default_text("systemd")).node.runtime == "systemd"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[resource]\nallocation_mode = 1", "resource.allocation_mode: unknown key; did you mean"),
        (f'[[agents]]\nid = "{"a" * 49}"', "agents.0.id: 'a"),
        ('[rpc]\nsocket = ""', "rpc.socket: is empty"),
        ('[resource]\ndefault-slots = { cpu = "0.5" }', "cpu: not a multiple of 1"),
        ('[plugins]\nallow = "sim"', "plugins.allow: expected a list, not 'sim'"),
        ("resource = 3", "resource: expected a table, not 3"),
        (
            '[[agents]]\nid = "a"\n[agents.resource]\ncuda = ["cuda0"]',
            "agents.0.resource.cuda: unknown key; if it is a device name, write devices = { cuda",
        ),
        (
            "[agents]\nx = 1",
            "agents: expected a list, not {'x': 1}; write [[agents]] for each table",
        ),
        ("[resource]\n'?x' = 1", "resource.?x: unknown key; allowed: allocation-mode"),
        ("[resource]\n'tuple[str, ...]' = 1", "resource.tuple[str, ...]: unknown key; allowed"),
        ('[resource]\n"\\u001b[31m" = 1', "resource.\\x1b[31m: unknown key; allowed"),
        ("[runtime.process.ulimits]\nnofile = 'x'", "runtime.process.ulimits.nofile: expected a"),
        ('[plugins."a\\nb"]\nx = 1', "plugins.a\\nb: invalid device name 'a\\nb'"),
        (
            '[node]\nstate-dir = "/a\\u0000"',
            "node.state-dir: invalid text '/a\\x00': expected printable characters",
        ),
        ('[node]\nstate-dir = ""', "node.state-dir: invalid path '': expected an absolute path"),
        ('[node]\nstate-dir = "state"', "node.state-dir: invalid path 'state': expected an"),
        ('[node]\nstate-dir = "~/state"', "node.state-dir: invalid path '~/state': expected an"),
        ("", "agent.toml: has no keys; a failed write may have emptied it"),
        ("\n# [node]\n", "agent.toml: has no keys"),
        (
            '[runtime.docker]\nallowed-mounts = ["/a\\u0000"]',
            "runtime.docker.allowed-mounts: invalid text '/a\\x00': expected printable characters",
        ),
        (
            '[[rpc.sockets]]\npath = "/s"\nrole = "agent"\nagents = ["x"]',
            "rpc.sockets.0.agents: unknown agent x (configured: main)",
        ),
        (
            '[[agents]]\nid = "a"\n[agents.resource]\nlimits = { cuda = "x" }',
            "agents.0.resource.limits.cuda: invalid amount 'x'",
        ),
        ("[nood]", "nood: unknown key; did you mean node? allowed: node, rpc, host"),
        ('[runtime.docker]\npublish-ports = "9-8"', "publish-ports: invalid port range '9-8'"),
        ('[runtime.docker]\npublish-address = "lo"', "publish-address: invalid address 'lo'"),
        ('[runtime.docker]\ncapabilities = ["all"]', "capabilities: invalid capability all"),
        ("[runtime.docker]\npids-limit = 0", "pids-limit: Input should be greater than"),
        ('[runtime.docker]\nlog-max-size = "big"', "log-max-size: "),
        ("[runtime.dokcer]", "runtime.dokcer: unknown key; did you mean docker?"),
        (
            '[node]\nruntime = "podman"',
            "node.runtime: Input should be 'docker', 'systemd' or 'process'",
        ),
        ('[node]\nid = "a b"', "node.id: invalid name 'a b': expected"),
        ('[resource]\nallocation-mode = "x"', "'shared', 'auto-split' or 'manual', not 'x'"),
        ("[resource]\nreserved-cpu = true", "resource.reserved-cpu: invalid value True"),
        ("[resource]\nreserved-mem = 1e3", "resource.reserved-mem: '1e3' has an exponent"),
        ("[resource]\ndefault-slots = { gpu = 1 }", "only cpu and mem have defaults"),
        ("[resource]\ndefault-slots = { mem = 0 }", "kernels need memory"),
        ("[host]\ncpus = 0", "host.cpus: Input should be greater than or equal to 1"),
        ('[rpc]\nlisten = "127.0.0.1:1"', "rpc: listen requires token-file"),
        ('[rpc]\nlisten = "localhost"', "rpc.listen: invalid address 'localhost': expected"),
        ('[rpc]\nlisten = "0.0.0.0:1"\ntoken-file = "/t"', "beyond loopback requires tls-cert"),
        (f'[rpc]\nsocket = "/{"x" * 120}"', "rpc.socket: longer than 107 bytes"),
        ('[runtime.docker]\nallowed-mounts = ["data"]', "invalid path 'data': expected"),
        (
            "[runtime.process]\nulimits = { nofile = 9 }\ndefault-ulimits = { nofile = 10 }",
            "runtime.process.default-ulimits: nofile: 10 exceeds the limit of 9",
        ),
        (
            "[runtime.systemd]\ndefault-ulimits = { rtprio = { soft = 0, hard = 1 } }",
            "runtime.systemd.default-ulimits: rtprio: 1 exceeds the limit of 0",
        ),
        (
            "[runtime.docker]\ndefault-ulimits = { nofile = -1 }\nulimits = { nofile = 9 }",
            "runtime.docker.default-ulimits: nofile: unlimited exceeds the limit of 9",
        ),
        (
            "[runtime.docker]\ndefault-ulimits = { nofile = { soft = 2, hard = 1 } }",
            "default-ulimits: the soft limit of nofile is above its hard limit",
        ),
        (
            "[runtime.docker]\ndefault-ulimits = { nofiles = 1 }",
            "default-ulimits: invalid ulimit nofiles: expected one of core, cpu",
        ),
        (
            "[runtime.docker]\ndefault-ulimits = { nofile = true }",
            "default-ulimits.nofile.soft: expected a number, not true",
        ),
        (
            "[runtime.docker]\ndefault-ulimits = { nofile = { soft = 1 } }",
            "default-ulimits.nofile.hard: is missing",
        ),
        (
            "[runtime.process]\nallowed-groups = [true]",
            "runtime.process.allowed-groups.0: expected the name of a group, or its number from 0",
        ),
        (
            '[[agents]]\nid = "a"\nallowed-mounts = ["data"]',
            "agents.0.allowed-mounts.0: invalid path 'data': expected an absolute path",
        ),
        ('[[agents]]\nid = "a"\nallowed-groups = [-1]', "agents.0.allowed-groups.0: expected the"),
        ("[[agents]]", "agents.0.id: is missing, and has no default"),
        ('[[agents]]\nid = "a"\n[[agents]]\nid = "a"', "agents: duplicate id a"),
        (
            '[[agents]]\nid = "a"\n[agents.resource]\ncuda.shares = 0.5',
            (
                "agents.0.resource.cuda: cuda.shares is a slot, not a device name;"
                ' agents are assigned whole devices: write cuda = ["cuda0"] under devices,'
                ' or in shared mode limits = { cuda = "0.5" } for a part of them'
            ),
        ),
        (
            '[[agents]]\nid = "a"\n[agents.resource.devices]\ncuda.shares = 0.5',
            'write cuda = ["cuda0"] under devices',
        ),
        (
            '[[agents]]\nid = "a"\n[agents.resource]\ndevices = { cpu = 1 }',
            "set cpu beside devices",
        ),
        ("[plugins]\nallw = 1", "plugins.allw: unknown key; did you mean allow? allowed: allow"),
        ("[plugins.cpu]\nx = 1", "cpu: built in"),
        ("[plugins.Cuda]\nx = 1", "Cuda: invalid device name 'Cuda'"),
        ("[plugins.cuda]\nrequired = 1", "cuda.required: expected true or false, not 1"),
        ("[node", "invalid TOML:"),
    ],
)
def test_invalid_setting_names_key_reason_and_expectation(text, line) -> None:
    lines = refusal(text)
    assert any(line in got for got in lines), lines
    assert all(got.startswith("agent.toml: ") for got in lines)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('[agent]\nid = "a"\n[agent.resource.allocations]\nmem = "8g"\n', "agent"),
        ('[[agents]]\nid = "a"\n[agents.agent]\nid = "a"\n', "agents.0.agent"),
        (
            '[[agents]]\nid = "a"\n[agents.resource.allocations]\ndevices = { "cuda.mem" = 0.5 }\n',
            "agents.0.resource.allocations",
        ),
    ],
)
def test_slot_based_file_is_refused_with_the_forms_to_write(text: str, where: str) -> None:
    (line,) = refusal(text)
    assert line.startswith(f"agent.toml: {where}: belongs to an older form, which divides slots;")
    assert "`devices`" in line
    assert "`limits`" in line
    assert "docs/explanation/slots-and-devices.md" in line


def test_key_named_as_an_older_table_is_unknown() -> None:
    assert "agents.0.agent: unknown key" in refusal('[[agents]]\nid = "a"\nagent = 1\n')[0]


MEANS = """[[agents]]
id = "a"
allowed-mounts = ["/data/a"]
network = "net-a"
allowed-networks = ["jobs-a"]
registry-auth = "/etc/agentd/a.json"
allowed-groups = [2000, "daemon"]
[[agents]]
id = "b"
network = "net-b"
[[agents]]
id = "c"
"""


def test_means_of_an_agent_replace_those_of_docker() -> None:
    runtime = '[runtime.docker]\nallowed-mounts = ["/data"]\npids-limit = 7\n'
    settings = read(runtime + MEANS)
    docker, own = settings.runtime.docker, settings.docker_settings_by_agent()
    assert own.keys() == {"a", "b"}
    assert own["a"] == docker.model_copy(
        update={
            "allowed_mounts": (Path("/data/a"),),
            "network": "net-a",
            "allowed_networks": ("jobs-a",),
            "registry_auth": Path("/etc/agentd/a.json"),
            "allowed_groups": (2000, "daemon"),
        }
    )
    assert own["b"] == docker.model_copy(update={"network": "net-b"})


@pytest.mark.parametrize("table", ["[runtime.docker]", '[[agents]]\nid = "a"'])
def test_empty_network_is_refused(table: str) -> None:
    """An engine takes it for its own bridge, on which the kernels of all teams are."""
    (line,) = refusal(f'{table}\nnetwork = ""\n')
    assert "network: " in line


@pytest.mark.parametrize("runtime", ["process", "systemd"])
def test_other_runtimes_refuse_means_of_an_agent(runtime: str) -> None:
    reason = f"is for the docker runtime; this node's runtime is {runtime}"
    keys = ("allowed-mounts", "network", "allowed-networks", "registry-auth", "allowed-groups")
    lines = [f"agent.toml: agents.0.{key}: {reason}" for key in keys]
    assert refusal(f'[node]\nruntime = "{runtime}"\n{MEANS}') == [
        *lines,
        f"agent.toml: agents.1.network: {reason}",
    ]


def test_errors_of_file_and_environment_are_reported_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {
        "AGENTD__NODE__RUNTIME": "podman",
        "AGENTD__AGENTS": "not json",
        "AGENTD__PLUGINS__CPU__COUNT": "1",
        "AGENTD__NOPE__X": "1",
        "AGENTD__RESOURCE__NOPE": "1",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    text = '_env_file = "x"\n[plugins]\nallw = 1\nopen-timeout = 0\n[plugins.sim]\nrequired = 1\n'
    with pytest.raises(ConfigRefused) as refused:
        load_text(text, FILE, environ)
    assert {problem.where for problem in refused.value.problems} == {
        *("AGENTD__NODE__RUNTIME", "AGENTD__AGENTS", "AGENTD__PLUGINS__CPU__COUNT"),
        *("AGENTD__NOPE__X", "AGENTD__RESOURCE__NOPE", "_env_file"),
        *("plugins.allw", "plugins.open-timeout", "plugins.sim.required"),
    }


ENVIRONMENT = {
    "a table that is a text": ("AGENTD__RPC", "x", "AGENTD__RPC: expected a table, not 'x'"),
    "a table that is empty": ("AGENTD__RPC", "", "AGENTD__RPC: expected a table, not ''"),
    "JSON that was cut": ("AGENTD__NODE", '{"id', "AGENTD__NODE: expected a table, not '{\"id'"),
    "a list that is a text": ("AGENTD__AGENTS", "x", "AGENTD__AGENTS: expected a list, not 'x'"),
    "a plugin's table that is a text": (
        "AGENTD__PLUGINS__SIM", "x", "AGENTD__PLUGINS__SIM: unknown key; allowed: allow, block"
    ),
    "an empty state folder": (
        "AGENTD__NODE__STATE_DIR", "", "AGENTD__NODE__STATE_DIR: invalid path '': expected an"
    ),
    "a relative state folder": (
        "AGENTD__NODE__STATE_DIR", "state", "AGENTD__NODE__STATE_DIR: invalid path 'state'"
    ),
    "a secret that ends with a newline": (
        "AGENTD__NODE__STATE_DIR", "/a\n", "AGENTD__NODE__STATE_DIR: invalid text '/a\\n': expected"
    ),
    "a variable of a file with CRLF": (
        "AGENTD__RPC__SOCKET", "/a\r", "AGENTD__RPC__SOCKET: invalid text '/a\\r': expected"
    ),
    "a path that is not UTF-8": (
        "AGENTD__RPC__SOCKET", "/\udcff", "AGENTD__RPC__SOCKET: invalid text '/\\udcff': expected"
    ),
    "a table that is not UTF-8": ("AGENTD__RPC", "\udcff", "AGENTD__RPC: expected a table, not"),
}  # fmt: skip


@pytest.mark.parametrize("case", ENVIRONMENT)
def test_unusable_variable_is_named_with_its_expectation(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    name, value, line = ENVIRONMENT[case]
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigRefused) as refused:
        load_text('[node]\nid = "n"', FILE, {name: value})
    (found,) = refused.value.lines()
    assert found.startswith(f"agent.toml: {line}")


def test_defaults_without_a_file_are_usable() -> None:
    assert load_text("", None, {}).settings == Settings()


def test_the_environment_goes_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {
        "AGENTD__RESOURCE__ALLOCATION_MODE": "manual",
        "AGENTD__RESOURCE__RESERVED_CPU": "2",
        "AGENTD__HOST": '{"cpus": 4, "mem": "1g"}',
        "AGENTD__PLUGINS__CUDA__COUNT": "3",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    text = """
[resource]
allocation-mode = "shared"
reserved-mem = "1g"
[plugins.cuda]
plugin = "sim"
"""
    loaded = load_text(text, FILE, environ)
    resource = loaded.settings.resource
    assert resource.allocation_mode is AllocationMode.MANUAL
    assert (resource.reserved_cpu, resource.reserved_mem) == (2, 2**30)
    assert (loaded.settings.host.cpus, loaded.settings.host.mem) == (4, 2**30)
    assert loaded.settings.plugins.tables[0].settings == {"count": 3}
    assert loaded.origin(("resource", "allocation-mode")) == "AGENTD__RESOURCE__ALLOCATION_MODE"
    assert loaded.origin(("resource", "reserved-mem")) == "agent.toml"
    assert loaded.origin(("node", "runtime")) == "default"


def test_a_missing_or_unreadable_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigRefused, match=r"nowhere\.toml: cannot be read: No such file"):
        load(tmp_path / "nowhere.toml", {})
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigRefused, match="not UTF-8"):
        load(binary, {})


def test_file_begins_with_a_byte_order_mark(tmp_path: Path) -> None:
    marked = tmp_path / "marked.toml"
    marked.write_text('[node]\nid = "n1"\n', encoding="utf-8-sig")
    assert load(marked, {}).settings.node.id == "n1"


def test_the_file_is_searched_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = tmp_path / "agent.toml"
    monkeypatch.setattr("agentd.config.loading.DEFAULT_PATH", there)
    assert find_config(None, {}) is None
    there.touch()
    assert find_config(None, {}) == there
    assert find_config(None, {"AGENTD_CONFIG": "/a"}) == Path("/a")
    assert find_config("/b", {"AGENTD_CONFIG": "/a"}) == Path("/b")


def test_setting_one_key_keeps_comments_and_order() -> None:
    text = default_text()
    changed = with_setting(text, "resource.allocation-mode", "manual", FILE)
    assert changed == text.replace('allocation-mode = "shared"', 'allocation-mode = "manual"')
    listed = with_setting(text, "plugins.block", '["cuda"]', FILE)
    assert read(listed).plugins.block == ("cuda",)
    added = with_setting(text, "plugins.cuda.count", "3", FILE)
    assert read(added).plugins.tables[0].settings == {"count": 3}
    agents = '[[agents]] # mine\nid = "a" # first\n'
    assert with_setting(agents, "agents.0.id", "b", FILE) == agents.replace('"a"', '"b"')


@pytest.mark.parametrize(
    ("key", "value"),
    [("resource.nope", "1"), ("node.runtime", "x"), ("agents.3.id", "x"), ("node.id.x", "1")],
)
def test_a_setting_that_would_break_the_file_is_refused(key, value) -> None:
    with pytest.raises(ConfigRefused):
        with_setting('[node]\nid = "n"\n', key, value, FILE)


def test_a_file_is_replaced_in_one_step_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text("old")
    path.chmod(0o600)
    write_file(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_dev_toml_keeps_everything_below_its_own_folder() -> None:
    settings = load(ROOT / "configs" / "dev.toml", {}).settings
    assert settings.node.runtime == "process"
    assert len(settings.agents) == 2
    assert settings.node.state_dir.is_relative_to("/tmp/agentd-dev")
    assert settings.rpc.socket.is_relative_to("/tmp/agentd-dev")
    assert {table.plugin for table in settings.plugins.tables} == {"sim"}


ENTRY = '[[rpc.tokens]]\nname = "{0}"\nfile = "/t/{0}"\nrole = "read"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            ENTRY.format("a") + "\n# of b\n" + ENTRY.format("b") + "# end\n",
            "\n# of b\n" + ENTRY.format("b") + "# end\n",
        ),
        (ENTRY.format("b") + ENTRY.format("a") + "[node]\n", ENTRY.format("b") + "[node]\n"),
        (ENTRY.format("a") + "# end\n", "[rpc]\n# end\n"),
        (
            '[rpc]  # inline\ntokens = [{name = "a", file = "/t/a", role = "read"}]\n',
            "[rpc]  # inline\n",
        ),
    ],
)
def test_a_token_s_entry_is_removed_and_nothing_else(text: str, expected: str) -> None:
    changed, file = without_token(text, "a", Path("agent.toml"))
    assert (changed, file) == (expected, Path("/t/a"))

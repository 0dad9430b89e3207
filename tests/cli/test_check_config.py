"""`agentd check-config`: what `agentd run` refuses, it refuses too, in one pass."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import fork_server
from support.certificates import certificate, certificate_that_ends
from support.daemon import AGENTS, Daemon, gpus

PLUGIN = """
import time
from agentd.plugin_api import AcceleratorPlugin, ContainerEdits, SettingProblem

class Odd(AcceleratorPlugin):
    @classmethod
    def validate(cls, settings):
        if settings.get("hangs"):
            time.sleep(1000)
        return [SettingProblem("a\\nagentd: b", "no\\nagentd: configuration OK")]

    def slot_types(self):
        return []

    def list_devices(self):
        return []

    def container_edits(self, allocation, features):
        return ContainerEdits()
"""


class Config:
    """A configuration with the process runtime, and how the commands take it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "agent.toml"
        self.values = {
            "node": f'id = "checked-{folder.name}"\nruntime = "process"\n'
            f'state-dir = "{folder}/state"\n',
            "rpc": f'socket = "{folder}/agentd.sock"\n',
            "plugins": 'allow = ["sim"]\n',
        }

    def write(self, further: str = "", **sections: str) -> None:
        text = "".join(f"[{key}]\n{value}" for key, value in {**self.values, **sections}.items())
        self.file.write_text(text + further)

    def run(self, command: str, **environ: str) -> tuple[int, str]:
        """Return the exit status, and the lines of errors as one text."""
        words = [command, "--config", str(self.file)]
        if environ:
            env = {**os.environ, **environ}
            argv = [sys.executable, "-m", "agentd", *words]
            done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
        else:
            done = fork_server.run("agentd", *words)
        lines = (line for line in done.stderr.splitlines() if not line.startswith("{"))
        return done.returncode, "\n".join(lines)

    def refusals(self) -> list[str]:
        """Return what `check-config` refuses, without the file; its status is that of `run`."""
        status, text = self.run("check-config")
        assert self.run("run")[0] == status != 0, text
        lead = f"agentd: {self.file}: "
        assert all(line.startswith(lead) for line in text.splitlines()), text
        return [line.removeprefix(lead) for line in text.splitlines()]


@pytest.fixture
def config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("AGENTD_RUN_DIR", str(folder / "run"))
    return Config(folder)


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("{folder}/file/a.sock", "rpc.socket: {folder}/file/a.sock: {folder}/file is a"),
        ("{folder}/file", "{folder}/file is a regular file, expected a socket or nothing"),
        ("{folder}/sub", "{folder}/sub is a directory, expected a socket or nothing"),
        ("{folder}/a\\u0000b", "a\\x00b': expected printable characters"),
    ],
)
def test_check_config_refuses_a_socket_that_run_cannot_make(
    config: Config, value: str, expected: str
) -> None:
    (config.folder / "file").touch()
    (config.folder / "sub").mkdir()
    config.write(rpc=f'socket = "{value.replace("{folder}", str(config.folder))}"\n')
    before = contents(config.folder)
    status, text = config.run("check-config")
    assert contents(config.folder) == before
    assert expected.replace("{folder}", str(config.folder)) in text
    assert config.run("run")[0] == status


def test_check_config_refuses_an_emptied_file(config: Config) -> None:
    config.file.write_text("# [node]\n")
    assert config.refusals() == ["has no keys; a failed write may have emptied it"]


def test_check_config_refuses_unknown_groups_of_sockets(config: Config) -> None:
    entry = f'[[rpc.sockets]]\npath = "{config.folder}/b.sock"\nrole = "read"\ngroup = "nosuch"\n'
    config.write(entry, rpc=config.values["rpc"] + 'socket-group = "nosuchgroup"\n')
    status, text = config.run("check-config")
    assert (status, text.replace(f"agentd: {config.file}: ", "").splitlines()) == (
        1,
        [
            "rpc.socket-group: no group 'nosuchgroup' on this host",
            "rpc.sockets.0.group: no group 'nosuch' on this host",
        ],
    )


@pytest.mark.parametrize(
    ("runtime", "text", "lines"),
    [
        (
            "process",
            '[runtime.process]\nallowed-groups = ["daemon", 4711, "nosuch"]\n',
            ["runtime.process.allowed-groups.2: no group 'nosuch' on this host"],
        ),
        (
            "docker",
            """
[runtime.docker]
allowed-groups = ["nosuch"]
[[agents]]
id = "a"
allowed-groups = ["root", "nosuch"]
""",
            [
                "runtime.docker.allowed-groups.0: no group 'nosuch' on this host",
                "agents.0.allowed-groups.1: no group 'nosuch' on this host",
            ],
        ),
        ("process", '[runtime.docker]\nallowed-groups = ["nosuch"]\n', []),
    ],
)
def test_check_config_refuses_an_unknown_allowed_group(
    config: Config, runtime: str, text: str, lines: list[str]
) -> None:
    """A start does not: the directory of groups may be away at a boot."""
    config.write(text, node=config.values["node"].replace("process", runtime))
    status, output = config.run("check-config")
    lead = f"agentd: {config.file}: "
    assert [line.removeprefix(lead) for line in output.splitlines()] == lines, output
    assert status == (78 if lines else 0)


@pytest.mark.parametrize("below", ["file", "file/below"])
def test_check_config_refuses_a_state_dir_that_cannot_be(config: Config, below: str) -> None:
    file = config.folder / "file"
    file.touch()
    config.write(node=f'id = "n"\nruntime = "process"\nstate-dir = "{config.folder}/{below}"\n')
    (line,) = config.refusals()
    assert line.startswith(f"node.state-dir: {file} is a regular file, expected a directory")


def test_check_config_refuses_a_file_in_the_state_dir(config: Config) -> None:
    (config.folder / "state").mkdir()
    (config.folder / "state" / "records").touch()
    config.write()
    assert "state/records is a regular file, expected a directory" in config.refusals()[0]


def listen_with_tls(config: Config, address: str, cert: Path, key: Path) -> None:
    token = config.folder / "token"
    token.write_text("a-token-that-is-long-enough")
    token.chmod(0o600)
    config.write(
        rpc=config.values["rpc"] + f'listen = "{address}"\ntoken-file = "{token}"\n'
        f'tls-cert = "{cert}"\ntls-key = "{key}"\n'
    )


def test_check_config_refuses_an_address_of_another_host(config: Config) -> None:
    listen_with_tls(config, "192.0.2.7:6123", *certificate(config.folder))
    status, text = config.run("check-config")
    assert status == 1
    assert "rpc.listen: 192.0.2.7:6123: Cannot assign requested address" in text


def test_check_config_refuses_an_expired_certificate(config: Config) -> None:
    cert, key = certificate_that_ends(config.folder, -1)
    listen_with_tls(config, "127.0.0.1:6123", cert, key)
    status, text = config.run("check-config")
    assert status == 78
    assert text.count(f"rpc.tls-cert: {cert} expired at ") == text.count("expired") == 1


def test_check_config_names_unusable_logins_of_registries(config: Config) -> None:
    file = config.folder / "registry.json"
    file.write_text('{"auths": {"a.example": {"auth": "?"}}, "credsStore": "absent"}')
    config.write(f'[runtime.docker]\nregistry-auth = "{file}"\n')
    status, text = config.run("check-config")
    where = f"agentd: {config.file}: runtime.docker.registry-auth: {file}"
    assert status == 78
    assert text.splitlines() == [
        f"{where}: auths.a.example cannot be used: auth is not the base64 of user:password",
        f"{where}: credsStore cannot be used: docker-credential-absent is not in PATH",
    ]


def test_check_config_reads_failpoints(config: Config) -> None:
    config.write()
    status, text = config.run("check-config", AGENTD_FAILPOINTS="nosuch=kill")
    assert status == 78
    assert "AGENTD_FAILPOINTS: invalid failpoint 'nosuch=kill'" in text


async def test_check_config_takes_a_running_daemon_s_configuration(up: Daemon) -> None:
    before = contents(up.folder)
    done = fork_server.run("agentd", "check-config", "--config", str(up.config_file))
    assert (done.returncode, done.stdout) == (0, "configuration OK\n"), done.stderr
    assert contents(up.folder) == before


async def test_check_config_refuses_a_new_id_while_kernels_live(up: Daemon) -> None:
    await up.running(kernel_id="k1")
    await up.stop()
    text, before = up.config_file.read_text(), contents(up.folder)
    up.config_file.write_text(text.replace(f'id = "{up.node}"', 'id = "another"'))
    done = fork_server.run("agentd", "check-config", "--config", str(up.config_file))
    assert contents(up.folder) == before
    refused = fork_server.run("agentd", "run", "--config", str(up.config_file))
    up.config_file.write_text(text)
    assert done.returncode == refused.returncode == 78
    expected = f"{up.config_file}: node.id: was {up.node}, whose kernels k1 are running"
    assert expected in done.stderr
    assert expected in refused.stderr


def plugin_path(folder: Path) -> str:
    """Install the plugin `odd` below a folder; return what PYTHONPATH needs."""
    info = folder / "odd-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[agentd.accelerators]\nodd = odd:Odd\n")
    (folder / "odd.py").write_text(PLUGIN)
    return str(folder)


def test_check_config_reports_a_validate_that_hangs(config: Config, tmp_path: Path) -> None:
    plugins = "open-timeout = 0.5\ncall-timeout = 1\n"
    config.write("[plugins.odd]\nhangs = true\n", plugins=plugins)
    status, text = config.run("check-config", PYTHONPATH=plugin_path(tmp_path))
    assert status == 1
    why = "the table is not validated: settings: validate: no answer within 1 s"
    assert f"plugins.odd: {why}" in text


@pytest.mark.parametrize("command", ["check-config", "plan"])
def test_a_plugin_s_problem_is_one_line(config: Config, tmp_path: Path, command: str) -> None:
    config.write("[plugins.odd]\n", plugins="open-timeout = 20\n")
    status, text = config.run(command, PYTHONPATH=plugin_path(tmp_path))
    assert status == 78
    lead = f"agentd: {config.file}: "
    assert text == f"{lead}plugins.odd.a agentd: b: no agentd: configuration OK"


def test_problems_of_a_file_are_listed_before_those_of_a_host(config: Config) -> None:
    config.write(
        '[plugins.cuda]\nplugin = "sim"\ncount = -4\n[plugins.Bar]\nx = 1\n'
        '[[agents]]\nid = "a"\nuser = "nosuchuser"\n',
        node=f'runtime = "podman"\nlog-level = "loud"\nstate-dir = "{config.folder}/state"\n',
        rpc=config.values["rpc"] + "max-connections = 0\n",
    )
    places = [line.partition(": ")[0] for line in config.refusals()]
    assert sorted(places) == [
        "node.log-level",
        "node.runtime",
        "plugins.Bar",
        "rpc.max-connections",
    ]


@pytest.mark.needs("root")
def test_problems_of_plugins_and_host_are_listed_at_once(config: Config) -> None:
    config.write(
        '[plugins.cuda]\nplugin = "sim"\ncount = -4\nbogus = 1\n'
        '[plugins.foo]\nplugin = "nosuch"\n'
        '[[agents]]\nid = "a"\nuser = "nosuchuser"\n'
        'resource = { cpu = "50%", mem = "50%", devices = { tpu = 1 } }\n'
        '[[rpc.tokens]]\nname = "t"\nfile = "/nonexistent/t"\nrole = "agent"\nagents = ["a"]\n',
        rpc=config.values["rpc"] + 'listen = "127.0.0.1:0"\nsocket-group = "nosuchgroup"\n',
        resource='allocation-mode = "manual"\n',
    )
    common = {
        *("agents.0.user", "agents.0.resource.devices.tpu"),
        *("plugins.cuda.bogus", "plugins.cuda.count"),
    }
    expected = {
        "plan": common,
        "run": {*common, "rpc.tokens.0.file"},
        "check-config": {
            *(*common, "rpc.tokens.0.file"),
            *("rpc.socket-group", "plugins.foo.plugin"),
        },
    }
    for command, places in expected.items():
        status, text = config.run(command)
        lines = [line.removeprefix(f"agentd: {config.file}: ") for line in text.splitlines()]
        assert (status, {line.partition(": ")[0] for line in lines}) == (78, places), command


def test_check_config_reports_each_limit_of_an_agent(config: Config) -> None:
    config.write('[[agents]]\nid = "a"\nresource.limits = { tpu = "x", cuda = "abc" }\n')
    assert [line.partition(": ")[0] for line in config.refusals()] == [
        "agents.0.resource.limits.tpu",
        "agents.0.resource.limits.cuda",
    ]


def test_check_config_adds_no_problem_that_follows_from_another(config: Config) -> None:
    config.write(
        AGENTS.replace("agent-2", "agent 2") + "resource.cpu = 1\n"
        '[[rpc.tokens]]\nname = "t"\nfile = 3\nrole = "agent"\nagents = ["agent-1"]\n',
        rpc=config.values["rpc"] + 'listen = "127.0.0.1:0"\n',
        resource='allocation-mode = "manual"\n',
    )
    places = [line.partition(": ")[0] for line in config.refusals()]
    assert sorted(places) == ["agents.1.id", "rpc.tokens.0.file"]


def test_check_config_starts_no_plugin_if_allow_is_unclear(config: Config, tmp_path: Path) -> None:
    config.write("[plugins.odd]\nhangs = true\n", plugins="allow = 3\n")
    status, text = config.run("check-config", PYTHONPATH=plugin_path(tmp_path))
    assert status == 78
    assert text == f"agentd: {config.file}: plugins.allow: expected a list, not 3"


def test_a_plugin_that_is_not_installed_is_not_called_blocked(config: Config) -> None:
    config.write('[plugins.tpu]\nplugin = "nosuch"\nrequired = true\n')
    status, text = config.run("run")
    assert status == 1
    assert "plugin tpu is required and failed: no entry point 'nosuch' is installed" in text


def test_check_config_prints_warnings_as_json(config: Config) -> None:
    config.write(gpus(1))
    done = fork_server.run("agentd", "check-config", "--config", str(config.file), "--json")
    assert json.loads(done.stdout) == {"ok": True, "warnings": []}, done.stderr

"""Every key of agent.toml: set once in the file, once by the environment, once by a reload."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from click.testing import CliRunner

from agentd.cli.agentd.main import agentd
from agentd.config.loading import load
from agentd.config.settings import Settings
from agentd.daemon.host_names import HostNames
from agentd.daemon.reload import APPLIED, Reload, flatten_settings
from support.certificates import certificate

DOCKER = {
    "socket": "/run/engine.sock",
    "network": "none",
    "allowed-mounts": ["/data"],
    "allowed-networks": ["lan"],
    "publish-address": "127.0.0.9",
    "publish-ports": "30000-30010",
    "capabilities": ["KILL"],
    "pids-limit": 7,
    "log-max-size": "1m",
    "log-max-files": 2,
    "registry-auth": "/etc/agentd/registry.json",
    "stop-timeout": 3,
    "ulimits": {"nofile": 1024},
    "default-ulimits": {"nofile": {"soft": 512, "hard": 1024}},
    "allowed-groups": [44],
}
SYSTEMD = {
    "user": "nobody",
    "pids-limit": 8,
    "stop-timeout": 4,
    "ulimits": {"nofile": 1025},
    "default-ulimits": {"core": {"soft": 0, "hard": 0}},
    "allowed-groups": ["daemon"],
}
PROCESS = {
    "user": "daemon",
    "log-max-size": "2m",
    "log-max-files": 3,
    "pids-limit": 9,
    "stop-timeout": 5,
    "ulimits": {"nofile": 1026},
    "default-ulimits": {"nofile": {"soft": 1026, "hard": 1026}},
    "allowed-groups": [45, "daemon"],
}


def every_key(folder: Path) -> dict[str, Any]:
    """Return another value than the default for each key; credentials lie in `folder`."""
    token = {"name": "t", "file": str(folder / "t"), "role": "read", "agents": ["a"]}
    return {
        "node": {
            "id": "n2",
            "state-dir": "/srv/agentd",
            "runtime": "process",
            "keep-ended": 5,
            "log-level": "error",
        },
        "rpc": {
            "socket": "/run/agentd/b.sock",
            "socket-group": "root",
            "listen": "127.0.0.1:7001",
            "token-file": str(folder / "admin"),
            "tls-cert": str(folder / "tls.crt"),
            "tls-key": str(folder / "tls.key"),
            "max-connections": 9,
            "tokens": [token],
            "sockets": [{"path": "/run/agentd/c.sock", "role": "admin"}],
        },
        "host": {"cpus": 3, "mem": "3g"},
        "runtime": {"docker": DOCKER, "systemd": SYSTEMD, "process": PROCESS},
        "resource": {
            "allocation-mode": "manual",
            "reserved-cpu": ["0"],
            "reserved-mem": "1g",
            "memory-align-size": "32m",
            "allocation-strategy": "fill",
            "affinity-policy": "prefer-single-node",
            "allow-fragmentation": True,
            "auto-split-order": "numa",
            "default-slots": {"cpu": 2, "mem": "1g"},
            "engine-devices": {"slurm": {"cuda": ["cuda0"]}, "kubernetes": "all"},
            "withhold-busy": True,
        },
        "agents": [{"id": "a", "resource": {"cpu": 1, "mem": "1g", "devices": {"cuda": 1}}}],
        "plugins": {
            "allow": ["sim"],
            "block": ["cuda"],
            "open-timeout": 6,
            "call-timeout": 7,
            "health-interval": 8,
            "gpu": {"plugin": "sim", "count": 2},
        },
        "metrics": {"per-kernel": False},
    }


def leaves(table: Mapping[str, Any], keys: set[str], path: str = "") -> dict[str, Any]:
    """Return the value of each of `keys` in the content of a file."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{path}{name}"
        found |= {key: value} if key in keys else leaves(value, keys, f"{key}.")
    return found


def shown(path: Path | None) -> dict[str, Any]:
    """Return what `agentd config show` prints."""
    option = () if path is None else ("--config", str(path))
    done = CliRunner().invoke(agentd, ["config", "show", "-o", "json", *option])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.output))


def settable(folder: Path) -> dict[str, Any]:
    """Return the value of each key; a key that the settings have and the test lacks fails it."""
    table = {"plugins": {"gpu": {}}}
    keys = {*flatten_settings(Settings(**table)), "agents"}
    values = leaves(every_key(folder), keys)
    assert values.keys() == keys
    return values


def test_every_key_is_read_from_the_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settable(tmp_path)
    file = tmp_path / "agent.toml"
    defaults = shown(None)
    file.write_text(tomlkit.dumps(every_key(tmp_path)))
    by_file = shown(file)
    for key, value in values.items():
        variable = f"AGENTD__{key.replace('.', '__').replace('-', '_').upper()}"
        monkeypatch.setenv(variable, value if isinstance(value, str) else json.dumps(value))
    by_environment = shown(None)
    assert by_file.keys() == by_environment.keys()
    for key, found in by_file.items():
        assert found["value"] != defaults.get(key, {}).get("value"), key
        assert found["origin"] == str(file), key
        assert by_environment[key]["origin"].startswith("AGENTD__"), key
        if key != "agents":
            assert by_environment[key]["value"] == found["value"], key


class RenewedRuntime:
    """A runtime that keeps the settings it was given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.given: Any = None

    def update_settings(self, settings: Any, *_: object) -> None:
        self.given = settings


class RenewedServer:
    """A server with TLS that counts what it was given."""

    has_tls = True
    current_tokens = ()

    def __init__(self) -> None:
        self.given: list[str] = []

    def replace_tokens(self, tokens: Any) -> None:
        self.given += [token.caller.name for token in tokens]

    def assign_groups(self, find_group: object) -> None:
        """All sockets have their groups."""

    def replace_tls(self, context: object) -> None:
        self.given.append("certificate")


@pytest.mark.needs("root", "openssl")
async def test_reload_applies_or_names_every_key(tmp_path: Path) -> None:
    values, file = settable(tmp_path), tmp_path / "agent.toml"
    for name in ("t", "admin", "before"):
        (tmp_path / name).write_text(f"{name}-token-that-is-long")
        (tmp_path / name).chmod(0o600)
    for made, name in zip(certificate(tmp_path), ("tls.crt", "tls.key"), strict=True):
        made.rename(tmp_path / name)
    listen = 'listen = "127.0.0.1:7001"\n'
    file.write_text(f'[rpc]\n{listen}token-file = "{tmp_path / "before"}"\n')
    names = ("docker", "systemd", "process")
    runtimes: Any = {name: RenewedRuntime(name) for name in names}
    server: Any = RenewedServer()
    loaded = load(file, {})
    reload = Reload(loaded, server, runtimes, HostNames(loaded.settings))
    file.write_text(tomlkit.dumps(every_key(tmp_path)))
    applied = {key for keys in APPLIED.values() for key in keys}
    assert applied <= values.keys()
    assert set(await reload.apply_and_log()) == values.keys() - applied - {"rpc.listen"}
    assert server.given == ["admin", "t", "certificate"]
    settings = load(file, {}).settings
    for name in names:
        wanted = flatten_settings(getattr(settings.runtime, name), f"runtime.{name}.")
        given = flatten_settings(runtimes[name].given, f"runtime.{name}.")
        for key in APPLIED[name]:
            assert given[key] == wanted[key], key

"""The commented default `agent.toml`, generated from the settings and their descriptions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import get_args

import tomlkit
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from agentd.config.plugins import PluginSettings
from agentd.config.settings import Settings

_HEAD = """\
# agentd: every setting, with its default. A line that begins with "# key =" shows a
# setting without a default. The environment goes over this file:
# AGENTD__RESOURCE__ALLOCATION_MODE=manual.
"""


_EXAMPLES = {
    "node.id": '"node-1"',
    "rpc.socket-group": '"agentd"',
    "rpc.listen": '"127.0.0.1:6001"',
    "rpc.token-file": '"/etc/agentd/token"',
    "rpc.tls-cert": '"/etc/agentd/tls.crt"',
    "rpc.tls-key": '"/etc/agentd/tls.key"',
    "runtime.docker.registry-auth": '"/etc/agentd/registry.json"',
    "runtime.systemd.user": '"kernels"',
    "host.cpus": "8",
    "host.mem": '"32g"',
}


_AGENTS = """
# Logical agents. None means one, "main", that owns everything.
# [[agents]]
# id = "agent-1"
# [agents.resource]  # manual mode only
# cpu = ["0", "1"]  # or "0-3", a count, or "50%"
# mem = "16g"  # or "50%"
# devices = { cuda = ["cuda0"] }  # ids, UUIDs or PCI addresses; a count, "50%", or "all"
"""


_CALLERS = """
# Further callers, each with its name, its role ("admin", "agent", "read") and its agents.
# [[rpc.tokens]]  # for TCP; `agentctl token create NAME` writes the file
# name = "team-a"
# file = "/etc/agentd/tokens/team-a"  # one line; mode 0600 or 0640
# role = "agent"
# agents = ["agent-1"]
# [[rpc.sockets]]  # further unix sockets; the main one is an admin's
# path = "/run/agentd/agent-1.sock"
# group = "team-a"
# role = "agent"
# agents = ["agent-1"]
"""


_TABLES = """
# A plugin's own table: its name is the device name, the first part of its slots.
# [plugins.cuda]
# plugin = "cuda"  # entry point to use; default: the table's name
# required = false  # true: a plugin that cannot open stops the start
"""


def default_text(runtime: str | None = None) -> str:
    """Return the commented default file, whose values are the defaults of the code.

    `runtime` replaces the default runtime.
    """
    text = _default_text()
    if runtime is None:
        return text
    default = f'runtime = "{Settings().node.runtime}"'
    return text.replace(default, f'runtime = "{runtime}"', 1)


def _default_text() -> str:
    parts = [_HEAD]
    for name, field in Settings.model_fields.items():
        if name == "agents":
            parts.append(_AGENTS)
            continue
        parts += _section((name,), field.default)
        if name == "rpc":
            parts.append(_CALLERS)
    return "".join([*parts, _TABLES])


def _section(keys: tuple[str, ...], value: BaseModel) -> Iterator[str]:
    head = ".".join(keys)
    nested = {n: v for n, v in value if isinstance(v, BaseModel)}
    if not nested:
        yield f"\n# {_summary(value)}\n[{head}]\n"
    for name, field in type(value).model_fields.items():
        if name in nested:
            yield from _section((*keys, name), nested[name])
            continue
        key = name.replace("_", "-")
        default = getattr(value, name)
        if _is_of_tables(field.annotation):
            continue
        if default is None or default is PydanticUndefined:
            yield f"# {key} = {_EXAMPLES[f'{head}.{key}']}  # {field.description}\n"
        else:
            yield f"{key} = {_toml(key, default)}  # {field.description}\n"


def _is_of_tables(annotation: object) -> bool:
    """Return whether a setting is an array of tables, which is shown as an example."""
    kinds = get_args(annotation)
    return any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds)


def _summary(value: BaseModel) -> str:
    if isinstance(value, PluginSettings):
        return "Plugins to load."
    text = (type(value).__doc__ or "").partition(": ")[2].partition("\n")[0]
    return text[:1].upper() + text[1:]


def _toml(key: str, value: object) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if key in ("memory-align-size", "reserved-mem", "log-max-size") and value:
        value = f"{int(str(value)) // 2**20}m"
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, Mapping):
        inside = ", ".join(f"{name} = {_toml(name, item)}" for name, item in value.items())
        return f"{{ {inside} }}"
    return tomlkit.item(value).as_string()

"""The file itself: the commented default, and changes that keep comments and order."""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import tomlkit
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from tomlkit.exceptions import ParseError, TOMLKitError

from agentd.config.loading import load_text
from agentd.config.plugins import PluginSettings
from agentd.config.settings import Settings
from agentd.errors import ConfigRefused, Problem

_HEAD = """\
# agentd: every setting, with its default. A line that starts with "# key =" shows a
# setting without a default. The environment goes over this file:
# AGENTD__RESOURCE__ALLOCATION_MODE=manual.
"""
NEW_MODE = 0o640
"""Of a file that is made: it names tokens and sockets, which is nobody else's business."""
_TOKENS = re.compile(r"\s*\[\[\s*rpc\s*\.\s*tokens\s*\]\]")
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
    """Return the commented default file; reading it gives the defaults of the code.

    With a `runtime` it has that one.
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
    """Tell whether a setting is an array of tables, which is shown as an example."""
    kinds = get_args(annotation)
    return any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds)


def _summary(value: BaseModel) -> str:
    if isinstance(value, PluginSettings):
        return "Which plugins are loaded."
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


def with_setting(text: str, key: str, value: str, path: Path | None) -> str:
    """Return the file's text with one setting changed, comments and order kept.

    `key` is a dotted path (`resource.allocation-mode`, `agents.0.id`), `value` a TOML value, or
    plain text if it is not valid TOML.

    Raises:
        ConfigRefused: the file would no longer be usable; every reason is listed.
    """
    source = str(path) if path else "defaults"
    try:
        document = tomlkit.parse(text)
        _assign(document, key.split("."), _value(value))
        changed = tomlkit.dumps(document)
    except (ParseError, TOMLKitError) as error:
        raise ConfigRefused([Problem(key, f"invalid TOML: {error}")], source) from None
    except (IndexError, TypeError, ValueError) as error:
        raise ConfigRefused([Problem(key, f"cannot be set in the file: {error}")], source) from None
    load_text(changed, path, {})
    return changed


def without_token(text: str, name: str, path: Path) -> tuple[str, Path]:
    """Return a file's text without an entry of `[[rpc.tokens]]`, and the token's own file.

    Raises:
        ConfigRefused: there is no such entry, or the file would no longer be usable.
    """
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise ConfigRefused([Problem("", f"invalid TOML: {error}")], str(path)) from None
    entries: Any = document.get("rpc", {}).get("tokens", [])
    names = [str(entry.get("name", "")) for entry in entries]
    if name not in names:
        why = f"no token {name} (the file has: {', '.join(names) or 'none'})"
        raise ConfigRefused([Problem("rpc.tokens", why)], str(path))
    index = names.index(name)
    file = Path(str(entries[index].get("file", "")))
    changed = _without_block(text, index)
    del entries[index]
    if not entries:
        document["rpc"].remove("tokens")
    if changed is None or _content(changed) != _content(tomlkit.dumps(document)):
        changed = tomlkit.dumps(document)
    load_text(changed, path, {})
    return changed, file


def _without_block(text: str, index: int) -> str | None:
    """Return a text without the lines of one `[[rpc.tokens]]`; the comments behind it stay.

    tomlkit counts those to the entry, though they are about what follows. None where the entries
    are not written as blocks.
    """
    lines = text.splitlines(keepends=True)
    starts = [at for at, line in enumerate(lines) if _TOKENS.match(line)]
    if index >= len(starts):
        return None
    start = starts[index]
    following = (at for at in range(start + 1, len(lines)) if lines[at].lstrip().startswith("["))
    end = next(following, len(lines))
    while lines[end - 1].strip() == "" or lines[end - 1].lstrip().startswith("#"):
        end -= 1
    return "".join(lines[:start] + lines[end:])


def _content(text: str) -> dict[str, Any] | None:
    """Return what a text says, without tables that are empty; None if it is not TOML."""
    try:
        return {key: value for key, value in tomllib.loads(text).items() if value != {}}
    except tomllib.TOMLDecodeError:
        return None


def _assign(container: Any, keys: list[str], value: object) -> None:  # noqa: ANN401 - tomlkit's containers
    *path, last = keys
    for key in path:
        if isinstance(container, list):
            container = container[int(key)]
        else:
            if key not in container:
                container[key] = tomlkit.table()
            container = container[key]
    if isinstance(container, list):
        container[int(last)] = value
    elif last in container and hasattr(container[last], "trivia"):
        item = tomlkit.item(value)
        item.trivia.comment_ws = container[last].trivia.comment_ws
        item.trivia.comment = container[last].trivia.comment
        container[last] = item
    else:
        container[last] = value


def _value(text: str) -> object:
    try:
        tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return tomlkit.parse(f"value = {text}")["value"]


def write_file(path: Path, text: str) -> None:
    """Replace a file in one step, keeping its mode and owner."""
    path = path.resolve()
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        status = path.stat() if path.exists() else None
        Path(temporary).chmod(status.st_mode & 0o7777 if status else NEW_MODE)
        if status and os.geteuid() == 0:
            os.chown(temporary, status.st_uid, status.st_gid)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

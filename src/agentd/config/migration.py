"""Migration of older configurations, which divide agents by slots.

Both published forms are read (https://github.com/lablup/backend.ai, proposals/BEP-1044, "Before"
and "After"): amounts by slot under `[agent.resource.allocations]`, for one agent or as the common
base of all `[[agents]]`; and devices under `[agents.resource]`, with the id in `[agents.agent]`.
Whole devices stay devices of one agent. A fraction of a device needs a limit in shared mode, so it
turns the whole file into shared mode, with a limit for every agent and device name.
Keys without an equivalent become comments with the reason.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import tomlkit

from agentd.core.partition.rules import Ids, parse_device_rule
from agentd.core.partition.split import DEFAULT_AGENT
from agentd.core.slots import WrittenFloat, device_name_of
from agentd.errors import ConfigRefused, Problem

_SHARED, _MANUAL = "shared", "manual"
_WHOLE, _SHARES = "device", "shares"
"""The slots of whole devices and of parts; the second is the mode of a plugin, too."""
_MEMORY = "mem"
"""The slot of a device's memory."""
_DIVIDED = (_SHARES, _WHOLE)
"""The slots whose amount is an agent's share of a device, in order of preference."""
_RESOURCE = ("reserved-cpu", "reserved-mem", "memory-align-size", "affinity-policy")
_WORDS = ("allocation-mode", "affinity-policy")
_TODAY = ("node", "rpc", "host", "runtime", "plugins")
"""Sections of today's form, which older files do not have."""
_MOST_DEVICES = 4096
"""Numbers above this are bytes of memory, not devices."""
_HAVE_SHARES = ("cuda", "rocm", "sim")
"""Entry points whose plugins have the settings `mode` and `memory-slot`."""
_HEAD = "# Written by `agentd config migrate`. Keys without an equivalent are comments.\n"
_SHARED_HEAD = """\
# Written by `agentd config migrate`. The file gave an agent a fraction of a device. That is a limit
# in shared mode, so the whole file is in shared mode now: all agents share all devices, and every
# agent has a limit for every device name. Lists of cores and devices are lost by it.
# Keys without an equivalent are comments.
"""


@dataclass(frozen=True)
class _Agent:
    """One agent of an older file; `amounts` by slot, `devices` by device name."""

    id: str
    cpu: Any = None
    mem: Any = None
    amounts: Mapping[str, Any] = field(default_factory=dict)
    devices: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def telling(self) -> dict[str, Any]:
        """The number of devices of this agent by device name, if a slot gives it."""
        return {name: self.amounts[slot] for name, slot in self.chosen.items()}

    @property
    def chosen(self) -> dict[str, str]:
        """The slot that gives the number of devices, by device name."""
        return dict(_telling(self.amounts))

    @property
    def names(self) -> list[str]:
        """The device names of its slots."""
        return list(dict.fromkeys(map(device_name_of, self.amounts)))

    @property
    def shared(self) -> list[str]:
        """The names of the devices that this agent had in shares or in part."""
        return [
            name
            for name in self.names
            if self.chosen.get(name, f"{name}.{_SHARES}") == f"{name}.{_SHARES}"
            or not _is_whole(self.telling[name])
        ]

    @property
    def is_divided(self) -> bool:
        """Whether this agent had a part of a device."""
        told = self.telling
        return any(name not in told or not _is_whole(told[name]) for name in self.names)


def explanations(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the replacement for each key of an older form in a file."""
    found = {"agent": _explained([*_lines(raw)])} if isinstance(raw.get("agent"), Mapping) else {}
    agents = _agents(raw)
    is_divided = _is_divided(agents)
    names = _device_names(agents)
    for index, entry in enumerate(_entries(raw)):
        keys = ["agent"] if isinstance(entry.get("agent"), Mapping) else []
        keys += ["resource.allocations"] if "allocations" in _table(entry, "resource") else []
        mode = () if found else _mode_lines(is_divided)
        why = _explained([*mode, *_agent_lines(agents[index], names, is_divided)])
        for key in keys:
            found[f"agents.{index}.{key}"] = why
            why = f"belongs to an older form; see agents.{index}.{keys[0]}"
    return found


def _explained(lines: list[str]) -> str:
    shown = "".join(f"\n    {line}" for line in lines if line and not line.startswith("#"))
    return f"belongs to an older form; convert it with `agentd config migrate FILE`:{shown}"


def migrated(text: str, path: Path) -> str:
    """Return the text of a file in today's form.

    Raises:
        ConfigRefused: the text is not TOML, or not of an older form.
    """
    try:
        raw = tomllib.loads(text, parse_float=WrittenFloat)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        raise ConfigRefused([Problem("", f"invalid TOML: {error}")], str(path)) from None
    agents = _agents(raw)
    if not explanations(raw) and not any(agent.amounts for agent in agents):
        why = "not of an older form: no [agent], [agents.agent] or allocations"
        raise ConfigRefused([Problem("", why)], str(path))
    head = _SHARED_HEAD if _is_divided(agents) else _HEAD
    return "\n".join([head, *_lines(raw), *_kept(raw, agents), *_left_out(raw)]) + "\n"


def _lines(raw: Mapping[str, Any]) -> Iterator[str]:
    agents = _agents(raw)
    is_divided = _is_divided(agents)
    yield "[resource]"
    yield from _resource_lines(_table(raw, "resource"), agents, is_divided)
    for agent in agents:
        yield ""
        yield from _agent_lines(agent, _device_names(agents), is_divided)
    plugins = _table(raw, "plugins")
    for name in dict.fromkeys(name for agent in agents for name in agent.shared):
        table = dict(_table(plugins, name))
        yield ""
        if table.get("plugin", name) in _HAVE_SHARES:
            table["mode"] = _SHARES
            if any(f"{name}.{_MEMORY}" in agent.amounts for agent in agents):
                table["memory-slot"] = True
        else:
            yield f"# agents had parts of {_key(name)}: set its plugin to offer them, if it can"
            if not table:
                continue
        yield tomlkit.dumps({"plugins": {name: _plain(table)}}).rstrip()


def _kept(raw: Mapping[str, Any], agents: list[_Agent]) -> Iterator[str]:
    """Yield the sections that already have today's form."""
    shared = {name for agent in agents for name in agent.shared}
    for section in _TODAY:
        content = raw.get(section)
        if not isinstance(content, Mapping):
            continue
        if section == "plugins":
            content = {name: value for name, value in content.items() if name not in shared}
        if content:
            yield ""
            yield tomlkit.dumps({section: _plain(content)}).rstrip()


def _is_divided(agents: list[_Agent]) -> bool:
    """Return whether an agent had a fraction of a device."""
    return any(agent.is_divided for agent in agents)


def _number(amount: object) -> Fraction | None:
    """Return an amount without a unit; None for any other."""
    text = amount.text if isinstance(amount, WrittenFloat) else str(amount)
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def _is_whole(amount: object) -> bool:
    """Return whether an amount is a number of whole devices."""
    number = _number(amount)
    return number is not None and number.denominator == 1


def _devices_of(amount: object) -> Fraction:
    """Return the number of devices, or parts of them; -1 for what is not one, such as bytes."""
    number = _number(amount)
    return number if number is not None and 0 <= number <= _MOST_DEVICES else Fraction(-1)


def _device_names(agents: list[_Agent]) -> list[str]:
    """Return the device names that the agents had, except cores and memory."""
    names = (name for agent in agents for name in (*agent.names, *agent.devices))
    return list(dict.fromkeys(names))


def _mode_lines(is_divided: bool) -> list[str]:  # noqa: FBT001 - the subject of the function
    return ["[resource]", f"allocation-mode = {_toml(_SHARED)}"] if is_divided else []


def _agent_lines(
    agent: _Agent,
    names: Collection[str],
    is_divided: bool,  # noqa: FBT001 - see above
) -> Iterator[str]:
    yield "[[agents]]"
    yield f"id = {_toml(agent.id)}"
    for key, value in agent.others.items():
        yield f"# {_key(key)} = {_toml(value)}: agents have no such setting"
    yield from _shared_lines(agent, names) if is_divided else _manual_lines(agent)


def _resource_lines(
    resource: Mapping[str, Any],
    agents: list[_Agent],
    is_divided: bool,  # noqa: FBT001 - see above
) -> Iterator[str]:
    mode = _word(resource.get("allocation-mode", ""))
    if is_divided:
        if mode != _SHARED:
            yield "# a fraction of a device becomes a limit, which requires shared mode"
        mode = _SHARED
    elif not mode and any(
        agent.cpu or agent.mem or agent.devices or agent.amounts for agent in agents
    ):
        mode = _MANUAL
    if mode:
        yield f"allocation-mode = {_toml(mode)}"
    for key in _RESOURCE:
        if key in resource:
            value = _word(resource[key]) if key in _WORDS else resource[key]
            yield f"{key} = {_toml(value)}"


def _shared_lines(agent: _Agent, names: Collection[str]) -> Iterator[str]:
    limits: dict[str, Any] = {}
    if agent.cpu is not None:
        limits["cpu"] = _limit_of(agent.cpu)
        if limits["cpu"] != agent.cpu:
            yield f"# cpu = {_toml(agent.cpu)}: now a number, because agents share all cores"
    if agent.mem is not None:
        limits["mem"] = agent.mem
    yield from _derived(agent)
    for name in names:
        value = agent.devices.get(name)
        if value is not None:
            yield f"# devices = {_inline({name: value})}: agents own no devices in shared mode"
        limits[name] = agent.telling.get(name, 0 if value is None else _limit_of(value))
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    if limits:
        yield "[agents.resource]"
        yield f"limits = {_inline(limits)}"


def _limit_of(rule: object) -> object:
    """Return as many devices as a rule of an older file names; None if it is not a rule."""
    if rule == "all":
        return "100%"
    try:
        parsed = parse_device_rule(rule)
    except ValueError:
        return None
    return len(parsed.names) if isinstance(parsed, Ids) else rule


def _derived(agent: _Agent) -> Iterator[str]:
    """Yield a comment for each amount that follows from the devices."""
    chosen = agent.chosen
    for slot, amount in agent.amounts.items():
        name = device_name_of(slot)
        written = f"# {_key(slot)} = {_toml(amount)}"
        if name not in chosen:
            yield f"{written}: not a number of devices; set the limit of {_key(name)} instead of 0"
        elif slot != chosen[name]:
            yield f"{written}: not divisible by itself; it is part of the device"


def _telling(amounts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each device name with the slot whose amount is an agent's share of it.

    The share of any property of a device is a share of the device, so it is `shares` or `device` if
    the file has one, else the slot with the largest number of devices.
    """
    for name in dict.fromkeys(map(device_name_of, amounts)):
        preferred = [slot for kind in _DIVIDED if (slot := f"{name}.{kind}") in amounts]
        others = [slot for slot in amounts if device_name_of(slot) == name]
        largest = max(others, key=lambda slot: _devices_of(amounts[slot]))
        if preferred:
            yield name, preferred[0]
        elif _devices_of(amounts[largest]) >= 0:
            yield name, largest


def _manual_lines(agent: _Agent) -> Iterator[str]:
    """Yield the devices of an agent, which the other modes ignore."""
    counts = {name: _number(amount) for name, amount in agent.telling.items()}
    devices = {name: int(count or 0) for name, count in counts.items()} | dict(agent.devices)
    yield from _derived(agent)
    if agent.cpu is None and agent.mem is None and not devices:
        return
    yield "[agents.resource]"
    for key, value in (("cpu", agent.cpu), ("mem", agent.mem)):
        if value is not None:
            yield f"{key} = {_toml(value)}"
    if devices:
        yield f"devices = {_inline(devices)}"


def _left_out(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield a comment for each section with keys that have no equivalent."""
    taken = {"resource": {"allocation-mode", *_RESOURCE}, "agent": {"id", "resource"}}
    left = []
    for section, content in raw.items():
        if section in _TODAY or (section == "agents" and isinstance(content, list)):
            continue
        keys = [*content] if isinstance(content, Mapping) else []
        others = [key for key in keys if key.replace("_", "-") not in taken.get(section, ())]
        if others or not keys:
            left.append(f"# [{_key(section)}] {', '.join(map(_key, others))}".rstrip())
    for index, entry in enumerate(_entries(raw)):
        others = [key for key in entry if key not in ("id", "agent", "resource")]
        others += [key for key in _table(entry, "agent") if key != "id"]
        if others:
            left.append(f"# [[agents]] {index}: {', '.join(map(_key, others))}")
    if left:
        yield ""
        yield "# without an equivalent, and left out (`agentd config init` shows all settings):"
        yield from left


def _agents(raw: Mapping[str, Any]) -> list[_Agent]:
    common = _table(raw, "agent")
    entries = _entries(raw)
    if not entries:
        return [_agent(common, common, str(common.get("id", DEFAULT_AGENT)))]
    return [
        _agent(
            entry,
            common,
            str(_table(entry, "agent").get("id") or entry.get("id") or f"agent-{number}"),
        )
        for number, entry in enumerate(entries, 1)
    ]


def _agent(entry: Mapping[str, Any], common: Mapping[str, Any], agent_id: str) -> _Agent:
    said: dict[str, Any] = {}
    for table in (common, entry):
        resource = _table(table, "resource")
        said |= {key: value for key, value in resource.items() if key != "allocations"}
        said |= _table(resource, "allocations")
    amounts: dict[str, Any] = {}
    devices: dict[str, Any] = {}
    for name, value in _table(said, "devices").items():
        if isinstance(value, Mapping):  # cuda.shares = 0.5 without quotes
            amounts |= {f"{name}.{kind}": amount for kind, amount in value.items()}
        elif "." in name or isinstance(value, WrittenFloat):
            amounts[name if "." in name else f"{name}.{_DIVIDED[0]}"] = value
        else:
            devices[name] = value
    others = {k: v for k, v in said.items() if k not in ("cpu", "mem", "devices")}
    return _Agent(agent_id, said.get("cpu"), said.get("mem"), amounts, devices, others)


def _entries(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    entries = raw.get("agents")
    found = entries if isinstance(entries, list) else []
    return [entry for entry in found if isinstance(entry, Mapping)]


def _table(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a table with kebab-case keys, empty if it is missing."""
    value = raw.get(key)
    if not isinstance(value, Mapping):
        return {}
    return {name.replace("_", "-"): below for name, below in value.items()}


def _word(value: object) -> str:
    return str(value).lower().replace("_", "-")


def _key(name: str) -> str:
    return tomlkit.key(name).as_string()


def _inline(values: Mapping[str, Any]) -> str:
    inside = ", ".join(f"{_key(name)} = {_toml(value)}" for name, value in values.items())
    return f"{{ {inside} }}"


def _toml(value: object) -> str:
    """Format a value on one line, with numbers as they were written."""
    if isinstance(value, WrittenFloat):
        return value.text
    if isinstance(value, Mapping):
        return _inline(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return tomlkit.item(value).as_string()


def _plain(value: Any) -> Any:
    """Convert numbers to tomlkit's, as they were written."""
    if isinstance(value, Mapping):
        return {key: _plain(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return tomlkit.parse(f"x = {value.text}")["x"] if isinstance(value, WrittenFloat) else value

"""Loading settings from a file and the environment; every problem is reported.

Keys are kebab-case; an unknown key is an error that names the nearest known one.
All errors are found before any is reported.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_settings import SettingsError

from agentd.config.agents import AgentResources, devices_line
from agentd.config.plugins import PluginSettings, table_problems
from agentd.config.settings import Settings
from agentd.core.slots import WrittenFloat
from agentd.errors import ConfigRefused, Problem
from agentd.tomlfile.regular_files import UnusableFile, read_regular

ENV_PREFIX = "AGENTD__"
SEARCHED = Path("/etc/agentd/agent.toml")
_UNKNOWN = "?"


@dataclass(frozen=True)
class Loaded:
    """Settings, the file they came from, and its raw content."""

    settings: Settings
    path: Path | None
    raw: Mapping[str, Any]
    environ: Mapping[str, str]

    def origin(self, keys: tuple[str, ...]) -> str:
        """Return where a setting comes from: a variable, the file, or `default`."""
        if name := _variable(keys, self.environ):
            return name
        return str(self.path) if _stands_in(self.raw, keys) else "default"

    def effective(self) -> Iterator[tuple[tuple[str, ...], object]]:
        """Yield every setting as its kebab-case key path and its value."""
        yield from _flatten(
            (), self.settings.model_dump(mode="json", exclude={"agents", "plugins"})
        )
        if self.settings.agents:
            yield ("agents",), self.raw.get("agents", [a.id for a in self.settings.agents])
        yield from _flatten(("plugins",), self.settings.plugins.model_dump(mode="json"))


def find_config(option: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the file to read: the option's, $AGENTD_CONFIG's, else the system's if it is there."""
    named = option or environ.get("AGENTD_CONFIG")
    if named:
        return Path(named)
    return SEARCHED if SEARCHED.exists() else None


def load(path: Path | None, environ: Mapping[str, str] = os.environ) -> Loaded:
    """Read settings; no path means the defaults, with the environment over them.

    Raises:
        ConfigRefused: the file cannot be read, or its settings cannot be used.
    """
    text = ""
    if path is not None:
        try:
            text = read_regular(path).text
        except UnusableFile as error:
            raise ConfigRefused([Problem("", str(error))], str(path)) from None
    return load_text(text, path, environ)


def load_text(text: str, path: Path | None, environ: Mapping[str, str]) -> Loaded:
    """Read settings from the text of a file."""
    source = str(path) if path else "defaults"
    try:
        raw = tomllib.loads(text, parse_float=WrittenFloat)
    except tomllib.TOMLDecodeError as error:
        raise ConfigRefused([Problem("", f"invalid TOML: {error}")], source) from None
    except (ValueError, RecursionError):
        why = "holds a number of over 4300 digits, or is nested too deeply"
        raise ConfigRefused([Problem("", why)], source) from None
    problems = list(unknown_variables(environ))
    values = snake(raw, Settings)
    try:
        settings = Settings(**values)
    except ValidationError as error:
        from agentd.config.migration import explanations  # noqa: PLC0415 - for refusals alone

        older = explanations(raw)
        found = [problem_of(dict(item), environ) for item in error.errors()]
        problems += [Problem(p.where, older.get(p.where, p.why)) for p in found]
        settings = None
    except SettingsError as error:
        problems.append(Problem("environment", f"{error}: {error.__cause__}"))
        settings = None
    extras = settings.plugins.model_extra if settings else values.get("plugins", {})
    problems += [
        Problem(f"plugins.{key}", why) for key, why in table_problems(_further_keys(extras or {}))
    ]
    if problems or settings is None:
        raise ConfigRefused(problems, source)
    return Loaded(settings, path, raw, environ)


def _further_keys(plugins: object) -> dict[str, object]:
    if not isinstance(plugins, Mapping):
        return {}
    known = PluginSettings.model_fields
    return {key.lstrip(_UNKNOWN): raw for key, raw in plugins.items() if key not in known}


def unknown_variables(
    environ: Mapping[str, str], root: type[BaseModel] = Settings, prefix: str = ENV_PREFIX
) -> Iterator[Problem]:
    """Yield a problem for each variable that names no section of the settings."""
    for name in environ:
        if name.upper().startswith(prefix):
            section = name[len(prefix) :].split("__")[0].lower()
            if section not in root.model_fields:
                allowed = ", ".join(f"{prefix}{field.upper()}__…" for field in root.model_fields)
                yield Problem(name, f"unknown section; allowed: {allowed}")


def _models_of(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for arg in get_args(annotation) if (model := _models_of(arg))), None)


def snake(raw: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Turn kebab-case keys into field names, and mark the others as unknown."""
    fields = {name.replace("_", "-"): name for name in model.model_fields}
    result: dict[str, Any] = {}
    for key, value in raw.items():
        name = fields.get(key)
        if name is None:
            is_table = model.model_config.get("extra") == "allow" and isinstance(value, dict)
            result[key if is_table else _UNKNOWN + key] = value
            continue
        below = _models_of(model.model_fields[name].annotation)
        result[name] = _snake_below(value, below) if below else value
    return result


def _snake_below(value: object, model: type[BaseModel]) -> object:
    if isinstance(value, list):
        return [_snake_below(item, model) for item in value]
    return snake(value, model) if isinstance(value, dict) else value


def problem_of(
    item: Mapping[str, Any],
    environ: Mapping[str, str],
    root: type[BaseModel] = Settings,
    prefix: str = ENV_PREFIX,
) -> Problem:
    """Return what pydantic found (an item of `ValidationError.errors`) in the terms of a file."""
    loc = tuple(str(part) for part in item["loc"])
    keys = tuple(part.lstrip(_UNKNOWN).replace("_", "-") for part in loc if not _is_union(part))
    where = _variable(keys, environ, prefix) or ".".join(
        part.lstrip(_UNKNOWN) if part.startswith(_UNKNOWN) else part.replace("_", "-")
        for part in loc
        if not _is_union(part)
    )
    if item["type"] == "extra_forbidden":
        return Problem(where, _unknown_key(loc, item["input"], _parent(loc, root)))
    message = item["msg"].removeprefix("Value error, ")
    message = _TYPES.get(item["type"], message)
    if item["type"] not in ("value_error", "missing"):
        message = f"{message}, not {_shown(item['input'])}"
    return Problem(where, message)


_TYPES = {
    "missing": "is missing, and has no default",
    "tuple_type": "expected a list",
    "dict_type": "expected a table",
    "mapping_type": "expected a table",
    "model_type": "expected a table",
    "string_type": "expected text",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
}
"""Messages for pydantic's error types, in the terms of a TOML file."""


def _is_union(part: str) -> bool:
    return "[" in part or part in ("int", "str", "tuple")


def _shown(value: object) -> str:
    return repr(value.text if isinstance(value, WrittenFloat) else value)


def _parent(loc: tuple[str, ...], root: type[BaseModel]) -> type[BaseModel]:
    model = root
    for part in loc[:-1]:
        if part in model.model_fields:
            model = _models_of(model.model_fields[part].annotation) or model
    return model


def _unknown_key(loc: tuple[str, ...], value: object, parent: type[BaseModel]) -> str:
    key = loc[-1].lstrip(_UNKNOWN)
    if parent is AgentResources and (line := devices_line(key, value)):
        return line
    if parent is AgentResources and isinstance(value, (list, str, int)):
        return f"unknown key; if it is a device name, write devices = {{ {key} = … }}"
    known = [name.replace("_", "-") for name in parent.model_fields]
    near = get_close_matches(key.replace("_", "-"), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"unknown key; {hint}allowed: {', '.join(known)}"


def _variable(
    keys: tuple[str, ...], environ: Mapping[str, str], prefix: str = ENV_PREFIX
) -> str | None:
    """Return the variable that sets a key, a part of it, or a table that contains it."""
    names = {name.upper(): name for name in environ}
    for end in range(len(keys), 0, -1):
        wanted = prefix + "__".join(keys[:end]).replace("-", "_").upper()
        if wanted in names:
            return names[wanted]
    below = prefix + "__".join(keys).replace("-", "_").upper() + "__"
    return next((names[name] for name in names if name.startswith(below)), None)


def _stands_in(raw: object, keys: tuple[str, ...]) -> bool:
    for key in keys:
        if not isinstance(raw, Mapping) or key not in raw:
            return False
        raw = raw[key]
    return True


def _flatten(keys: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(value, Mapping) and keys[-1:] != ("default-slots",):
        for key, below in value.items():
            yield from _flatten((*keys, key.replace("_", "-")), below)
    else:
        yield keys, value

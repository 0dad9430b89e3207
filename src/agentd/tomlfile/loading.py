"""Settings from TOML text and the environment, with every problem in the terms of the file.

Keys are kebab-case in the file; the environment sets `PREFIX` + `SECTION__KEY` in upper snake case.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, SettingsError

from agentd.core.slots import WrittenFloat
from agentd.errors import ConfigRefused, Problem
from agentd.tomlfile.regular_files import UnusableFile, read_regular
from agentd.tomlfile.section import Section

UNKNOWN = "?"
"""Mark before the name of a key that the model does not list."""
_S = TypeVar("_S", bound=BaseSettings)


class Parsed(NamedTuple, Generic[_S]):
    """Settings, None if they have problems; with the file's own content and its field names."""

    settings: _S | None
    problems: list[Problem]
    raw: Mapping[str, Any]
    values: Mapping[str, Any]


def read_text(path: Path | None) -> str:
    """Return the text of a settings file; no path means an empty one.

    Raises:
        ConfigRefused: the file cannot be read.
    """
    if path is None:
        return ""
    try:
        return read_regular(path).text
    except UnusableFile as error:
        raise ConfigRefused([Problem("", str(error))], str(path)) from None


def parse(
    model: type[_S], text: str, source: str, environ: Mapping[str, str], prefix: str
) -> Parsed[_S]:
    """Validate the text of a file, with the environment over it.

    Raises:
        ConfigRefused: the text is not TOML.
    """
    try:
        raw = tomllib.loads(text, parse_float=WrittenFloat)
    except tomllib.TOMLDecodeError as error:
        raise ConfigRefused([Problem("", f"invalid TOML: {error}")], source) from None
    except (ValueError, RecursionError):
        why = "holds a number of over 4300 digits, or is nested too deeply"
        raise ConfigRefused([Problem("", why)], source) from None
    problems = list(_unknown_sections(environ, model, prefix))
    values = _field_names(raw, model)
    settings = None
    try:
        settings = model(**values)
    except ValidationError as error:
        problems += [problem_of(dict(item), environ, model, prefix) for item in error.errors()]
    except SettingsError as error:
        problems.append(Problem("environment", f"{error}: {error.__cause__}"))
    return Parsed(settings, problems, raw, values)


def _unknown_sections(
    environ: Mapping[str, str], root: type[BaseModel], prefix: str
) -> Iterator[Problem]:
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


def _field_names(raw: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Turn kebab-case keys into field names, and mark the others as unknown."""
    fields = {name.replace("_", "-"): name for name in model.model_fields}
    result: dict[str, Any] = {}
    for key, value in raw.items():
        name = fields.get(key)
        if name is None:
            is_table = model.model_config.get("extra") == "allow" and isinstance(value, dict)
            result[key if is_table else UNKNOWN + key] = value
            continue
        below = _models_of(model.model_fields[name].annotation)
        result[name] = _fields_below(value, below) if below else value
    return result


def _fields_below(value: object, model: type[BaseModel]) -> object:
    if isinstance(value, list):
        return [_fields_below(item, model) for item in value]
    return _field_names(value, model) if isinstance(value, dict) else value


def problem_of(
    item: Mapping[str, Any],
    environ: Mapping[str, str],
    root: type[BaseModel],
    prefix: str = "",
) -> Problem:
    """Return what pydantic found (an item of `ValidationError.errors`) in the terms of a file."""
    loc = tuple(str(part) for part in item["loc"])
    keys = tuple(part.lstrip(UNKNOWN).replace("_", "-") for part in loc if not _is_union(part))
    where = variable_of(keys, environ, prefix) or ".".join(
        part.lstrip(UNKNOWN) if part.startswith(UNKNOWN) else part.replace("_", "-")
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
    key = loc[-1].lstrip(UNKNOWN)
    if issubclass(parent, Section) and (explained := parent.explain_unknown(key, value)):
        return explained
    known = [name.replace("_", "-") for name in parent.model_fields]
    near = get_close_matches(key.replace("_", "-"), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"unknown key; {hint}allowed: {', '.join(known)}"


def variable_of(keys: tuple[str, ...], environ: Mapping[str, str], prefix: str) -> str | None:
    """Return the variable that sets a key, a part of it, or a table that contains it."""
    names = {name.upper(): name for name in environ}
    for end in range(len(keys), 0, -1):
        wanted = prefix + "__".join(keys[:end]).replace("-", "_").upper()
        if wanted in names:
            return names[wanted]
    below = prefix + "__".join(keys).replace("-", "_").upper() + "__"
    return next((names[name] for name in names if name.startswith(below)), None)


def is_set_in(raw: object, keys: tuple[str, ...]) -> bool:
    """Return whether a file's content has a key."""
    for key in keys:
        if not isinstance(raw, Mapping) or key not in raw:
            return False
        raw = raw[key]
    return True

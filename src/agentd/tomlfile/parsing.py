"""Settings from TOML text and the environment, with every problem in the terms of the file.

Keys are kebab-case in the file; the environment sets `PREFIX` + `SECTION__KEY` in upper snake case.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from agentd.core.names import did_you_mean
from agentd.core.printable import printable_line
from agentd.core.slots import WrittenFloat
from agentd.errors import ConfigRefused, Problem, StartRefused
from agentd.tomlfile.environment import FileSettings, nested_models
from agentd.tomlfile.regular_files import SilentFile, UnusableFile, read_configured

_S = TypeVar("_S", bound=FileSettings)


def read_text(path: Path | None) -> str:
    """Return the text of a settings file; no path means an empty one.

    Raises:
        ConfigRefused: the file cannot be read.
        StartRefused: its file system does not answer, which time can mend.
    """
    if path is None:
        return ""
    try:
        return read_configured(path).text
    except SilentFile as error:
        raise StartRefused(f"{path} {error}") from None
    except UnusableFile as error:
        raise ConfigRefused([Problem("", str(error))], str(path)) from None


def source_name(path: Path | None) -> str:
    """Return the name of a file in messages; "defaults" without one."""
    return str(path) if path else "defaults"


def parse_settings(
    model: type[_S], text: str, path: Path | None, environ: Mapping[str, str], prefix: str
) -> tuple[_S, Mapping[str, Any]]:
    """Return the settings of a file with the environment over it, and the file's content.

    A file without a key is refused: a write that failed leaves one.

    Raises:
        ConfigRefused: the text is not TOML, or settings are unusable; lists every problem.
    """
    source = source_name(path)
    try:
        raw = tomllib.loads(text, parse_float=WrittenFloat)
    except tomllib.TOMLDecodeError as error:
        raise ConfigRefused([Problem("", f"invalid TOML: {error}")], source) from None
    except (ValueError, RecursionError):
        reason = "holds a number of over 4300 digits, or is nested too deeply"
        raise ConfigRefused([Problem("", reason)], source) from None
    # keywords that pydantic-settings takes for options of its own
    reserved = [key for key in raw if key.startswith("_")]
    problems = [Problem(printable_line(key), "unknown key") for key in reserved]
    if path is not None and not raw:
        problems.append(Problem("", "has no keys; a failed write may have emptied it"))
    problems += _unknown_section_problems(environ, model, prefix)
    try:
        settings = model(**{key: value for key, value in raw.items() if key not in reserved})
    except ValidationError as error:
        items = error.errors()
        problems += [translate_error(dict(item), environ, model, prefix) for item in items]
    if problems:
        raise ConfigRefused(problems, source)
    return settings, raw


def _unknown_section_problems(
    environ: Mapping[str, str], root: type[BaseModel], prefix: str
) -> Iterator[Problem]:
    for name in environ:
        if name.upper().startswith(prefix):
            section = name[len(prefix) :].split("__")[0].lower()
            if section not in root.model_fields:
                allowed = ", ".join(f"{prefix}{field.upper()}__…" for field in root.model_fields)
                yield Problem(printable_line(name), f"unknown section; allowed: {allowed}")


def translate_error(
    error: Mapping[str, Any],
    environ: Mapping[str, str],
    root: type[BaseModel],
    prefix: str = "",
) -> Problem:
    """Return an item of `ValidationError.errors` as a problem of the file."""
    keys = tuple(map(str, error["loc"]))
    key = ".".join(keys)
    location = find_variable(keys, environ, prefix) or key
    message = _MESSAGES.get(error["type"], error["msg"].removeprefix("Value error, "))
    if error["type"] == "extra_forbidden":
        message = _unknown_key_problem(keys[-1], error["input"], _table_at(keys[:-1], root))
    elif error["type"] not in ("value_error", "missing"):
        value = error["input"]
        message += f", not {(value.text if isinstance(value, WrittenFloat) else value)!r}"
        if location == key and isinstance(error["input"], Mapping):
            field = _fields_by_key(_table_at(keys[:-1], root)).get(keys[-1])
            is_list_of_tables = field is not None and any(nested_models(field.annotation))
            message += f"; write [[{key}]] for each table" if is_list_of_tables else ""
    return Problem(printable_line(location), printable_line(message))


_MESSAGES = {
    "missing": "is missing, and has no default",
    "tuple_type": "expected a list",
    "dict_type": "expected a table",
    "mapping_type": "expected a table",
    "model_type": "expected a table",
    "string_type": "expected text",
    "path_type": "expected a path",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
}
"""Messages for pydantic's error types, in the terms of a TOML file."""


def _unknown_key_problem(key: str, value: object, parent: type[BaseModel]) -> str:
    explain = getattr(parent, "explain_unknown", None)
    if explain is not None and (explained := explain(key, value)):
        return str(explained)
    known = list(_fields_by_key(parent))
    hint = did_you_mean(key.replace("_", "-"), known)
    tables = ", and tables" if parent.model_config.get("extra") == "allow" else ""
    return f"unknown key; {hint}allowed: {', '.join(known)}{tables}"


def _table_at(keys: tuple[str, ...], root: type[BaseModel]) -> type[BaseModel]:
    """Return the model of the table at a key path, or of the nearest table above it."""
    model = root
    for key in keys:
        if field := _fields_by_key(model).get(key):
            model = next(nested_models(field.annotation), model)
    return model


def _fields_by_key(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a table by their keys in the file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def find_variable(keys: tuple[str, ...], environ: Mapping[str, str], prefix: str) -> str | None:
    """Return the variable that sets a key, a part of it, or a table that contains it."""
    names = {name.upper(): name for name in environ}
    for end in range(len(keys), 0, -1):
        variable = prefix + "__".join(keys[:end]).replace("-", "_").upper()
        if variable in names:
            return names[variable]
    table_prefix = prefix + "__".join(keys).replace("-", "_").upper() + "__"
    return next((names[name] for name in names if name.startswith(table_prefix)), None)


def has_key(raw: object, keys: tuple[str, ...]) -> bool:
    """Return whether a file's content has a key."""
    for key in keys:
        if not isinstance(raw, Mapping) or key not in raw:
            return False
        raw = raw[key]
    return True

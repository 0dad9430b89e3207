"""Settings from TOML text and the environment, with every problem in the terms of the file.

Keys are kebab-case in the file; the environment sets `PREFIX` + `SECTION__KEY` in upper snake case.
After an error the rest is validated without the key that it is about (see `salvage`), so one pass
reports the problems of all sections.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, SettingsError

from agentd.core.names import did_you_mean
from agentd.core.printable import printable_line
from agentd.core.slots import WrittenFloat
from agentd.errors import ConfigRefused, Problem
from agentd.tomlfile.key_paths import (
    KeyPath,
    Keys,
    is_list_of_tables,
    key_path,
    model_at,
    with_field_names,
)
from agentd.tomlfile.regular_files import UnusableFile, read_regular
from agentd.tomlfile.salvage import salvage

_S = TypeVar("_S", bound=BaseSettings)


class Parsed(NamedTuple, Generic[_S]):
    """The valid part of settings, with their problems and the file's content.

    `settings` is None if no part is valid. Keys in `left_out` have their defaults.
    """

    settings: _S | None
    problems: list[Problem]
    left_out: frozenset[Keys]
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
    values = with_field_names(raw, model)
    settings, left_out = None, frozenset[Keys]()
    try:
        settings = model(**values)
    except ValidationError as error:
        found = error.errors()
        settings, further, left_out = salvage(model, values, found)
        problems += [problem_of(dict(item), environ, model, prefix) for item in (*found, *further)]
    except SettingsError as error:
        problems.append(Problem("environment", f"{error}: {error.__cause__}"))
    return Parsed(settings, problems, left_out, raw, values)


def _unknown_sections(
    environ: Mapping[str, str], root: type[BaseModel], prefix: str
) -> Iterator[Problem]:
    for name in environ:
        if name.upper().startswith(prefix):
            section = name[len(prefix) :].split("__")[0].lower()
            if section not in root.model_fields:
                allowed = ", ".join(f"{prefix}{field.upper()}__…" for field in root.model_fields)
                yield Problem(printable_line(name), f"unknown section; allowed: {allowed}")


def problem_of(
    item: Mapping[str, Any],
    environ: Mapping[str, str],
    root: type[BaseModel],
    prefix: str = "",
) -> Problem:
    """Return an item of `ValidationError.errors` as a problem of the file."""
    path = key_path(item["loc"], root)
    key = ".".join(path.shown)
    where = variable_of(path.shown, environ, prefix) or key
    message = _TYPES.get(item["type"], item["msg"].removeprefix("Value error, "))
    if item["type"] == "extra_forbidden":
        message = _unknown_key(path, item["input"], model_at(path.data[:-1], root))
    elif item["type"] not in ("value_error", "missing"):
        message = f"{message}, not {_shown(item['input'])}"
        is_table = where == key and isinstance(item["input"], Mapping)
        if is_table and is_list_of_tables(path.data, root):
            message = f"{message}; write [[{key}]] for each table"
    return Problem(printable_line(where), printable_line(message))


_TYPES = {
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


def _shown(value: object) -> str:
    return repr(value.text if isinstance(value, WrittenFloat) else value)


def _unknown_key(path: KeyPath, value: object, parent: type[BaseModel]) -> str:
    key = path.shown[-1]
    explain = getattr(parent, "explain_unknown", None)
    if explain is not None and (explained := explain(key, value)):
        return str(explained)
    known = [name.replace("_", "-") for name in parent.model_fields]
    hint = did_you_mean(key.replace("_", "-"), known)
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

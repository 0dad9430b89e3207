"""Key paths: the position of a value in a file, in the spelling of the file and of the models.

A key of the file is kebab-case and the field of the model snake_case. A key that the model does not
list is marked, so that `allocation_mode` in a file is not taken for the field of that name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel

Keys: TypeAlias = tuple[str | int, ...]

_MARK = "?"


class KeyPath(NamedTuple):
    """The keys of a value: of the validated data, and as the file spells them."""

    data: Keys
    shown: tuple[str, ...]


def unmarked(key: str) -> str:
    """Return an unlisted key in the file's spelling."""
    return key.removeprefix(_MARK)


def with_field_names(raw: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Return a table with field names for listed keys; mark the others."""
    fields = {name.replace("_", "-"): name for name in model.model_fields}
    result: dict[str, Any] = {}
    for key, value in raw.items():
        name = fields.get(key)
        if name is None:
            is_table = model.model_config.get("extra") == "allow" and isinstance(value, dict)
            result[key if is_table else _MARK + key] = value
        else:
            result[name] = _converted(value, model.model_fields[name].annotation)
    return result


def key_path(loc: Keys, root: type[BaseModel]) -> KeyPath:
    """Return the key path of an error's location, which also names the members of unions."""
    data: list[str | int] = []
    shown: list[str] = []
    shape: object = root
    for part in loc:
        members = _members(shape)
        if len(members) > 1:
            shape = next((member for member in members if _tag(member) == part), object)
            continue
        key = str(part)
        data.append(part)
        is_field = _is_model(members[0]) and key in members[0].model_fields
        shown.append(key.replace("_", "-") if is_field else unmarked(key))
        shape = _below(members[0], part)
    return KeyPath(tuple(data), tuple(shown))


def model_at(keys: Keys, root: type[BaseModel]) -> type[BaseModel]:
    """Return the model of the table at a key path, or of the nearest table above it."""
    models = (member for shape in _shapes(keys, root) for member in _members(shape))
    return [model for model in models if _is_model(model)][-1]


def is_list_of_tables(keys: Keys, root: type[BaseModel]) -> bool:
    """Return whether a key holds a list of tables, which TOML writes as [[key]]."""
    *_, shape = _shapes(keys, root)
    (only, *_) = _members(shape)
    return get_origin(only) is tuple and _is_model(_members(_below(only, 0))[0])


def _shapes(keys: Keys, root: type[BaseModel]) -> Iterator[object]:
    """Yield the annotation of the root and of each key."""
    shape: object = root
    yield shape
    for key in keys:
        shape = _below(_members(shape)[0], key)
        yield shape


def _below(shape: object, key: str | int) -> object:
    """Return the annotation of a key below one that is not a union; `object` if there is none."""
    if _is_model(shape):
        field = shape.model_fields.get(str(key))
        return field.annotation if field is not None else object
    arguments = get_args(shape)
    if not arguments:
        return object
    return arguments[0] if get_origin(shape) is tuple else arguments[-1]


def _members(shape: object) -> list[Any]:
    """Return the members of a union without None; of anything else, itself."""
    origin = get_origin(shape)
    if origin is Annotated:
        return _members(get_args(shape)[0])
    if origin not in (Union, UnionType):
        return [shape]
    found = [m for arm in get_args(shape) if arm is not NoneType for m in _members(arm)]
    return found or [object]


def _tag(member: object) -> str:
    """Return the name by which pydantic's locations call a member of a union."""
    return member.__name__ if isinstance(member, type) and not get_args(member) else str(member)


def _is_model(shape: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(shape, type) and not get_args(shape) and issubclass(shape, BaseModel)


def _converted(value: object, shape: object) -> object:
    """Return a value with field names, if it has the shape of its annotation."""
    for member in _members(shape):
        if isinstance(value, dict) and _is_model(member):
            return with_field_names(value, member)
        if isinstance(value, list) and get_origin(member) is tuple:
            return [_converted(item, _below(member, 0)) for item in value]
    return value

"""The part of invalid settings that is valid.

A key with an error is left out and the rest is validated again, until nothing is wrong. Two rules
keep the further errors true:

- A table that lacks a key is not judged as a whole: its own errors may follow from the gap.
- An element of a list is never left out alone: the others would get other indexes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError, create_model, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings

from agentd.tomlfile.key_paths import Keys, key_path

_S = TypeVar("_S", bound=BaseSettings)
_MAX_ROUNDS = 16
_MAX_TRIED_KEYS = 32

Errors: TypeAlias = Sequence[ErrorDetails]


class Salvaged(NamedTuple, Generic[_S]):
    """The valid part or None, the further errors, and the left-out keys."""

    settings: _S | None
    errors: Errors
    left_out: frozenset[Keys]


def salvage(model: type[_S], values: Mapping[str, Any], errors: Errors) -> Salvaged[_S]:
    """Return the valid part of settings; `errors` are those of the whole."""
    return _Salvage(model, values).salvaged(errors)


class _Salvage(Generic[_S]):
    """Repeated validation of the same values, each time without more keys."""

    def __init__(self, model: type[_S], values: Mapping[str, Any]) -> None:
        self._root = model
        self._values = values
        self._left_out: set[Keys] = set()
        self._data: Any = {}

        def leave_out(cls: type[BaseModel], data: Any) -> Any:
            del cls  # pydantic makes a class method of a function with this parameter
            self._data = data
            return _without(data, self._left_out)

        validators: dict[str, Any] = {"leave_out": model_validator(mode="before")(leave_out)}
        self._model = create_model(model.__name__, __base__=model, __validators__=validators)

    def salvaged(self, errors: Errors) -> Salvaged[_S]:
        further: list[ErrorDetails] = []
        settings, _ = self._validated()
        for _ in range(_MAX_ROUNDS):
            is_left = [self._leave_out(self._keys_of(error)) for error in errors]
            if not all(is_left):
                break
            settings, errors = self._validated()
            if settings is not None:
                break
            lacking = {keys[:end] for keys in self._left_out for end in range(len(keys) + 1)}
            further += [error for error in errors if self._keys_of(error) not in lacking]
        return Salvaged(settings, further, frozenset(self._left_out))

    def _keys_of(self, error: ErrorDetails) -> Keys:
        return key_path(error["loc"], self._root).data

    def _validated(self) -> tuple[_S | None, Errors]:
        try:
            return self._model(**self._values), []
        except ValidationError as error:
            return None, error.errors()

    def _leave_out(self, keys: Keys) -> bool:
        """Leave out a key, or the table that lacks it; return whether anything was left out."""
        while keys and (isinstance(keys[-1], int) or not self._is_there(keys)):
            keys = keys[:-1]
        if keys:
            self._left_out.add(self._culprit(keys) or keys)
        return bool(keys)

    def _is_there(self, keys: Keys) -> bool:
        if any(keys[:end] in self._left_out for end in range(1, len(keys) + 1)):
            return False
        return _at(self._data, keys) is not None

    def _culprit(self, keys: Keys) -> Keys | None:
        """Return the only key of a table that makes it invalid, if there is one."""
        table = _at(self._data, keys)
        if not isinstance(table, Mapping) or len(table) > _MAX_TRIED_KEYS:
            return None
        for key in table:
            tried = (*keys, key)
            if tried in self._left_out:
                continue
            self._left_out.add(tried)
            _, errors = self._validated()
            self._left_out.discard(tried)
            if not any(self._keys_of(error)[: len(keys)] == keys for error in errors):
                return tried
        return None


def _at(data: Any, keys: Keys) -> Any:
    for key in keys:
        if isinstance(data, Mapping):
            data = data.get(key)
        elif isinstance(data, (list, tuple)) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            return None
    return data


def _without(data: Any, left_out: Collection[Keys]) -> Any:
    """Return data without some keys."""
    if not left_out:
        return data
    if isinstance(data, Mapping):
        return {
            key: _without(value, _below(left_out, key))
            for key, value in data.items()
            if (key,) not in left_out
        }
    if isinstance(data, (list, tuple)):
        return [_without(value, _below(left_out, index)) for index, value in enumerate(data)]
    return data


def _below(left_out: Collection[Keys], key: str | int) -> list[Keys]:
    return [keys[1:] for keys in left_out if keys[0] == key and len(keys) > 1]

"""Settings from a file and the environment, which takes precedence.

A key is kebab-case in the file, and upper snake case in the environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource

from agentd.core.slots import WrittenFloat


class Environment(EnvSettingsSource):
    """The environment, with the keys of the file; lists and tables are JSON."""

    def __call__(self) -> dict[str, Any]:
        values: dict[str, Any] = rename_to_file_keys(super().__call__(), self.settings_cls)
        return values

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        del field_name, field
        return _decode_json(value)

    def explode_env_vars(
        self, field_name: str, field: FieldInfo, env_vars: Mapping[str, str | None]
    ) -> dict[str, Any]:
        """Return the keys of one section; those without a known type are JSON or text."""
        values = super().explode_env_vars(field_name, field, env_vars)
        has_tables = any(
            model.model_config.get("extra") == "allow" for model in nested_models(field.annotation)
        )
        return _decode_all(values) if has_tables else values


class FileSettings(BaseSettings):
    """The settings of one file; the constructor takes its content."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del env_settings, dotenv_settings, file_secret_settings
        return Environment(settings_cls), init_settings


def nested_models(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the models in a field's annotation: of its table, or of the tables in its list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from nested_models(argument)


def rename_to_file_keys(values: Any, model: type[BaseModel]) -> Any:
    """Return values of a model by the keys of the file, in place of the names of its fields."""
    if isinstance(values, list):
        return [rename_to_file_keys(item, model) for item in values]
    if not isinstance(values, Mapping):
        return values
    renamed = dict(values)
    for name, field in model.model_fields.items():
        if name in values:
            inner_value = renamed.pop(name)
            for inner_model in nested_models(field.annotation):
                inner_value = rename_to_file_keys(inner_value, inner_model)
            renamed[field.alias or name] = inner_value
    return renamed


def _decode_all(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _decode_all(inner_value) for key, inner_value in value.items()}
    return _decode_json(value)


def _decode_json(value: Any) -> Any:
    """Return the value of a text in JSON; other text stays, and is validated as such."""
    try:
        return json.loads(value, parse_float=WrittenFloat) if isinstance(value, str) else value
    except ValueError:
        return value

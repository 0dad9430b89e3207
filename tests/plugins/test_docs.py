"""The tables in the docs are ones that the plugin takes."""

import re
import tomllib
from pathlib import Path

import pytest

from agentd_generic import GenericPlugin

PAGE = Path(__file__).parents[2] / "docs" / "plugins" / "use-any-accelerator.md"
TABLES = [
    (name, settings)
    for block in re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for name, settings in tomllib.loads(block)["plugins"].items()
]


@pytest.mark.parametrize(("name", "settings"), TABLES)
def test_a_table_of_the_docs_is_valid(name: str, settings: dict[str, object]) -> None:
    assert settings["plugin"] == "generic"
    assert GenericPlugin.validate(settings) == [], name

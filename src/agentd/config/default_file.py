"""The commented default `agent.toml`; a test holds it to the defaults of the settings."""

from __future__ import annotations

from pathlib import Path

_FILE = Path(__file__).with_name("agent.toml")


def default_text(runtime: str = "docker") -> str:
    """Return the default file for a runtime."""
    text = _FILE.read_text(encoding="utf-8")
    return text.replace('runtime = "docker"', f'runtime = "{runtime}"', 1)

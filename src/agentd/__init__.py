"""agentd: a node agent that divides a host's devices among logical agents."""

from pathlib import Path

__version__ = Path(__file__).with_name("VERSION").read_text(encoding="ascii").strip()

"""agentd: a node agent that divides a host's devices among logical agents."""

__version__ = "0.2.0"

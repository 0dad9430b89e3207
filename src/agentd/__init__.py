"""agentd: the node agent that divides a machine's devices among logical agents."""

__version__ = "0.2.0"

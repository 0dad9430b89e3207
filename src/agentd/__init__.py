"""agentd: a node agent that divides a host's devices among logical agents."""

with open(  # noqa: PTH123 - pathlib takes as long as all else that a program imports at first
    __file__.replace("__init__.py", "VERSION"), encoding="ascii"
) as _file:
    __version__ = _file.read().strip()

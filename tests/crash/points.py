"""The runtimes that pass each failpoint, and the points at which a death leaves the same state."""

from typing import NamedTuple

from agentd import failpoints

RUNTIMES = frozenset({"process", "docker", "systemd"})
PASSED_BY = {
    "docker": (
        "create.after_pull",
        "create.before_engine_create",
        "create.after_engine_create",
        "create.after_engine_start",
        "create.before_undo",
        "create.after_undo",
    ),
    "process systemd": (
        "create.after_record",
        "create.after_group",
        "create.after_spawn",
        "stop.after_term",
        "stop.after_kill",
        "delete.after_rename",
        "delete.after_group",
    ),
    "process": tuple(name for name in failpoints.POINTS if name.startswith("shim.")),
}
"""The points that not every runtime passes."""
SAME_AS = {
    "start.after_recall": ("start.after_discover",),
    "shutdown.after_drain": ("shutdown.before_drain",),
    "record.before_move": ("create.after_runtime",),
    "record.before_drop": ("delete.after_runtime",),
    "create.after_plan": ("create.after_commit",),
    "create.before_engine_create": ("intent.after_replace",),
    "create.after_runtime": ("create.after_spawn", "create.after_engine_start"),
    "shim.before_identity": ("shim.after_fork",),
    "shim.after_identity": ("shim.after_fork",),
    "shim.after_go": ("shim.after_fork",),
    "shim.before_answer": ("shim.after_fork",),
    "shim.after_exit": ("shim.before_exit",),
    "stop.before_runtime": ("record.after_move",),
    "stop.after_runtime": ("stop.after_kill",),
    "delete.before_runtime": ("record.after_replace",),
    "reconcile.after_find": ("reconcile.before_find",),
    "drain.before_save": ("shutdown.before_drain",),
    "plugin.before_spawn": ("start.after_locks",),
    "plugin.after_list": ("plugin.after_open",),
}
"""An earlier point with the same state outside: between the two the daemon only reads and waits.

Where there are two, they belong to different runtimes.
"""


class Point(NamedTuple):
    on: frozenset[str]
    same_as: tuple[str, ...]


_ON = {name: frozenset(on.split()) for on, names in PASSED_BY.items() for name in names}
POINTS = {
    name: Point(_ON.get(name, RUNTIMES), SAME_AS.get(name, ()))
    for name in sorted(failpoints.POINTS)
}
"""Every point by name."""

"""When each failpoint is reached, and the crash states that several of them share."""

from typing import NamedTuple

RUNTIMES = frozenset({"process", "docker", "systemd"})
_PROCESS, _DOCKER = frozenset({"process"}), frozenset({"docker"})
_ON_HOST = RUNTIMES - _DOCKER


class Point(NamedTuple):
    """A point, when it is reached, and the runtimes that pass it.

    `same_as` names an earlier point with the same state outside: between the two the daemon only
    reads and waits. If it names several, they belong to different runtimes.
    """

    name: str
    reached: str
    on: frozenset[str] = RUNTIMES
    same_as: tuple[str, ...] = ()


_ALL = (
    Point("start.after_locks", "the state folder and the node id are locked"),
    Point("start.after_discover", "plugins are open, devices divided and remembered"),
    Point(
        "start.after_recall",
        "shares of creates that nobody saw the end of are held",
        same_as=("start.after_discover",),
    ),
    Point("start.after_server", "the socket is there, nothing is answered yet"),
    Point("start.before_ready", "every runtime was listed, readiness is not told yet"),
    Point(
        "shutdown.before_drain",
        "a signal came, creates may be under way",
    ),
    Point("shutdown.after_drain", "no create is under way", same_as=("shutdown.before_drain",)),
    Point("shutdown.after_server", "the socket is gone"),
    Point("shutdown.after_plugins", "the plugins' processes are gone"),
    Point("intent.before_replace", "an intent is written beside its place"),
    Point("intent.after_replace", "an intent is in its place"),
    Point("record.before_replace", "a record is written beside its place"),
    Point("record.after_replace", "a record is in its place"),
    Point(
        "record.before_move",
        "a kernel runs, or has ended, and its record does not say so",
        same_as=("create.after_runtime",),
    ),
    Point("record.after_move", "a record says how far its kernel has come"),
    Point(
        "record.before_drop",
        "a kernel is gone, its record is still there",
        same_as=("delete.after_runtime",),
    ),
    Point("record.after_drop", "a record is gone"),
    Point("claim.after_commit", "a claim is charged, no plugin was asked"),
    Point("claim.before_replace", "the record of a claim is written beside its place"),
    Point("claim.after_replace", "the record of a claim is in its place, nobody was answered"),
    Point("claim.before_drop", "a claim has ended, its record is still there"),
    Point("claim.after_drop", "the record of a claim is gone, its devices are held"),
    Point("engines.before_replace", "the ready engines are written beside their place"),
    Point("engines.after_replace", "the ready engines are in their place, nobody was answered"),
    Point("devices.before_replace", "the inventory is written beside its place"),
    Point("devices.after_replace", "the inventory is in its place"),
    Point("node.before_replace", "the node's id and runtimes are written beside their place"),
    Point("node.after_replace", "the node's id and runtimes are in their place"),
    Point("create.after_commit", "the ledger is charged, no store or runtime was asked"),
    Point(
        "create.after_plan",
        "the plugins said what the kernel needs",
        same_as=("create.after_commit",),
    ),
    Point("create.after_pull", "the image is there", _DOCKER),
    Point(
        "create.before_engine_create",
        "the engine is about to be asked",
        _DOCKER,
        same_as=("intent.after_replace",),
    ),
    Point("create.after_engine_create", "there is a container that never ran", _DOCKER),
    Point("create.after_engine_start", "the container runs, nobody looked at it", _DOCKER),
    Point("create.before_undo", "a container is not wanted, and there", _DOCKER),
    Point("create.after_undo", "a container that was not wanted is gone", _DOCKER),
    Point("create.after_record", "the bundle is there, and the record in it", _ON_HOST),
    Point(
        "create.after_group",
        "the cgroup is there, empty (systemd: the slice is wide enough)",
        _ON_HOST,
    ),
    Point("create.after_spawn", "the shim answered (systemd: the unit has started)", _ON_HOST),
    Point(
        "create.after_runtime",
        "the kernel runs, the table does not say so yet",
        same_as=("create.after_spawn", "create.after_engine_start"),
    ),
    Point("shim.after_fork", "the command's process waits for its go", _PROCESS),
    Point(
        "shim.before_identity",
        "the identity is written beside its place",
        _PROCESS,
        same_as=("shim.after_fork",),
    ),
    Point(
        "shim.after_identity",
        "the identity is in its place, the command has no go",
        _PROCESS,
        same_as=("shim.after_fork",),
    ),
    Point("shim.after_go", "the command may run", _PROCESS, same_as=("shim.after_fork",)),
    Point(
        "shim.before_answer",
        "the command runs, the daemon does not know",
        _PROCESS,
        same_as=("shim.after_fork",),
    ),
    Point("shim.before_exit", "nothing of the kernel is left, that is not written yet", _PROCESS),
    Point(
        "shim.after_exit",
        "how the kernel ended is written",
        _PROCESS,
        same_as=("shim.before_exit",),
    ),
    Point(
        "stop.before_runtime",
        "the table says stopping, nothing is done",
        same_as=("record.after_move",),
    ),
    Point("stop.after_term", "the kernel was asked to end", _ON_HOST),
    Point("stop.after_kill", "processes that did not end were killed", _ON_HOST),
    Point(
        "stop.after_runtime",
        "the kernel has ended, the table does not say so",
        same_as=("stop.after_kill",),
    ),
    Point(
        "delete.before_runtime",
        "the kernel has ended and is all there",
        same_as=("record.after_replace",),
    ),
    Point("delete.after_rename", "the kernel's bundle is set aside", _ON_HOST),
    Point("delete.after_group", "the kernel's cgroup is gone (systemd: its unit)", _ON_HOST),
    Point("delete.after_runtime", "nothing of the kernel is left, the table has it"),
    Point("delete.before_answer", "the removal is noted, only the caller does not know"),
    Point("adopt.before_list", "the runtimes' events are heard, nothing is listed"),
    Point("adopt.after_list", "the list is there, nothing is compared"),
    Point("adopt.after_action", "one difference is settled, others are not"),
    Point("adopt.before_discard", "a kernel that never ran is held, and about to be removed"),
    Point("adopt.after_discard", "a kernel that never ran is gone, its share is held"),
    Point("reconcile.before_find", "something happened to a kernel, nobody looked"),
    Point(
        "reconcile.after_find",
        "what happened is known, the table does not say so",
        same_as=("reconcile.before_find",),
    ),
    Point("reconcile.after_settle", "what happened to one kernel is settled"),
    Point(
        "drain.before_save", "a device is about to be drained", same_as=("shutdown.before_drain",)
    ),
    Point("drain.after_save", "a device is drained and remembered so, the caller does not know"),
    Point(
        "plugin.before_spawn",
        "a plugin's process is about to be started",
        same_as=("start.after_locks",),
    ),
    Point("plugin.after_spawn", "a plugin's process is there, it was told nothing"),
    Point("plugin.after_load", "a plugin is imported, not open"),
    Point("plugin.after_open", "a plugin is open, not listed"),
    Point(
        "plugin.after_list",
        "a plugin's devices are known, the partition does not say so",
        same_as=("plugin.after_open",),
    ),
    Point("plugin.before_kill", "a plugin's process is lost or unwanted, and may be there"),
    Point("plugin.after_kill", "a plugin's process is gone, its helpers may not be"),
)
POINTS = {point.name: point for point in _ALL}
"""Every point by name."""

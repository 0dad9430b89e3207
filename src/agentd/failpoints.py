"""Named points at which a test may make agentd fail, wait or die.

A point stands at every step that changes something outside: in a store, an engine, a process.
Nothing happens at one unless AGENTD_FAILPOINTS was set when the program started:

    AGENTD_FAILPOINTS="create.after_engine_create=2*off->kill; intent.before_replace=error(ENOSPC)"

    points  = point { ";" point }
    point   = name "=" term { "->" term }
    term    = [ count "*" ] action            the term counts for so many visits, then the next
    action  = "off" | "kill" | "kill(parent)" | "delay(" milliseconds ")" | "error(" errno ")"

A term without a count applies to all further visits. The notation is a subset of FreeBSD's fail(9).

Imports little, and nothing of agentd: the shim of a process kernel uses it too.
"""

from __future__ import annotations

import errno
import os
import signal
import time

VARIABLE = "AGENTD_FAILPOINTS"

POINTS = {
    "start.after_locks": "the state folder and the node id are locked",
    "start.after_discover": "plugins are open, devices divided and remembered",
    "start.after_recall": "shares of creates that nobody saw the end of are held",
    "start.after_server": "the socket is there, nothing is answered yet",
    "start.before_ready": "every runtime was listed, readiness is not told yet",
    "shutdown.before_drain": "a signal came, creates may be under way",
    "shutdown.after_drain": "no create is under way",
    "shutdown.after_server": "the socket is gone",
    "shutdown.after_plugins": "the plugins' processes are gone",
    "intent.before_replace": "an intent is written beside its place",
    "intent.after_replace": "an intent is in its place",
    "record.before_replace": "a record is written beside its place",
    "record.after_replace": "a record is in its place",
    "record.before_move": "a kernel runs, or has ended, and its record does not say so",
    "record.after_move": "a record says how far its kernel has come",
    "record.before_drop": "a kernel is gone, its record is still there",
    "record.after_drop": "a record is gone",
    "devices.before_replace": "the inventory is written beside its place",
    "devices.after_replace": "the inventory is in its place",
    "node.before_replace": "the node's id and runtimes are written beside their place",
    "node.after_replace": "the node's id and runtimes are in their place",
    "create.after_commit": "the ledger is charged, nothing is outside yet",
    "create.after_plan": "the plugins said what the kernel needs",
    "create.after_pull": "docker: the image is there",
    "create.before_engine_create": "docker: the engine is about to be asked",
    "create.after_engine_create": "docker: there is a container that never ran",
    "create.after_engine_start": "docker: it runs, nobody looked at it",
    "create.before_undo": "docker: a container is not wanted, and there",
    "create.after_undo": "docker: what was not wanted is gone",
    "create.after_record": "process: the bundle is there, and the record in it (systemd too)",
    "create.after_group": "process: the cgroup is there, empty (systemd: the slice is wide enough)",
    "create.after_spawn": "process: the shim answered (systemd: the unit has started)",
    "create.after_runtime": "it runs, the table does not say so yet",
    "shim.after_fork": "process: the command's process waits for its go",
    "shim.before_identity": "process: the identity is written beside its place",
    "shim.after_identity": "process: the identity is in its place, the command has no go",
    "shim.after_go": "process: the command may run",
    "shim.before_answer": "process: the command runs, the daemon does not know",
    "shim.before_exit": "process: nothing of the kernel is left, that is not written yet",
    "shim.after_exit": "process: how it ended is written",
    "stop.before_runtime": "the table says stopping, nothing is done",
    "stop.after_term": "process: the kernel was asked to end (systemd too)",
    "stop.after_kill": "process: what did not end was killed (systemd too)",
    "stop.after_runtime": "the kernel has ended, the table does not say so",
    "delete.before_runtime": "the kernel has ended and is all there",
    "delete.after_rename": "process: the kernel's bundle is set aside (systemd too)",
    "delete.after_group": "process: its cgroup is gone (systemd: its unit)",
    "delete.after_runtime": "nothing of the kernel is left, the table has it",
    "delete.before_answer": "only the caller does not know",
    "adopt.before_list": "the runtimes' events are heard, nothing is listed",
    "adopt.after_list": "the list is there, nothing is compared",
    "adopt.after_action": "one difference is settled, others are not",
    "adopt.before_discard": "what never ran is held, and about to be removed",
    "adopt.after_discard": "what never ran is gone, its share is held",
    "reconcile.before_find": "something happened to a kernel, nobody looked",
    "reconcile.after_find": "what happened is known, the table does not say so",
    "reconcile.after_settle": "what happened to one kernel is settled",
    "drain.before_save": "a device is about to be drained",
    "drain.after_save": "a device is drained and remembered so, the caller does not know",
    "plugin.before_spawn": "a plugin's process is about to be started",
    "plugin.after_spawn": "a plugin's process is there, it was told nothing",
    "plugin.after_load": "a plugin is imported, not open",
    "plugin.after_open": "a plugin is open, not listed",
    "plugin.after_list": "a plugin's devices are known, the partition does not say so",
    "plugin.before_kill": "a plugin's process is lost or unwanted, and may be there",
    "plugin.after_kill": "a plugin's process is gone, its helpers may not be",
}
"""Every point, and what has happened when it is reached."""


class Term:
    """One action, and for how many visits more it counts (None: all)."""

    def __init__(self, action: str, argument: str, count: int | None) -> None:
        self.action = action
        self.argument = argument
        self.count = count


_armed: dict[str, list[Term]] = {}
_handed_on: dict[str, str] = {}
_parent = os.getppid()


def arm(text: str) -> None:
    """Set the points that a text describes, in place of all that were set before.

    Raises:
        ValueError: the text is invalid; the message says what is expected.
    """
    armed: dict[str, list[Term]] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        name, found, terms = part.partition("=")
        if not found or name not in POINTS:
            known = ", ".join(POINTS)
            raise ValueError(f"invalid failpoint {part!r}: expected POINT=TERM; points: {known}")
        armed[name] = [_term(term.strip()) for term in terms.split("->")]
    _armed.clear()
    _armed.update(armed)
    _handed_on.clear()
    _handed_on.update({VARIABLE: text} if armed else {})


def armed() -> list[str]:
    """Return the names of the points that are set."""
    return list(_armed)


def inherited() -> dict[str, str]:
    """Return the environment that hands the points on to a program of our own."""
    return dict(_handed_on)


def _term(text: str) -> Term:
    count, counted, rest = text.rpartition("*")
    action, _, argument = rest.removesuffix(")").partition("(")
    is_known = (
        (action == "off" and not argument)
        or (action == "kill" and argument in ("", "parent"))
        or (action == "delay" and argument.isdecimal())
        or (action == "error" and hasattr(errno, argument))
    )
    if not is_known or (counted and not count.isdecimal()):
        allowed = "off, kill, kill(parent), delay(MILLISECONDS), error(ERRNO), each after COUNT*"
        raise ValueError(f"invalid term {text!r}: expected {allowed}")
    return Term(action, argument, int(count) if counted else None)


def hit(name: str) -> None:
    """Visit a point; a delay blocks."""
    if _armed:
        time.sleep(_visited(name))


async def reach(name: str) -> None:
    """Visit a point in a coroutine; a delay does not block other tasks."""
    if _armed and (pause_s := _visited(name)):
        import asyncio  # noqa: PLC0415 - the shim has no use for it

        await asyncio.sleep(pause_s)


def _visited(name: str) -> float:
    """Do what is set for this visit, and return for how long to wait."""
    term = _due(name)
    if term is None:
        return 0.0
    if term.action == "kill":
        os.kill(_parent if term.argument else os.getpid(), signal.SIGKILL)
    if term.action == "error":
        number = getattr(errno, term.argument)
        raise OSError(number, f"{os.strerror(number)} (failpoint {name})")
    return int(term.argument) / 1000 if term.action == "delay" else 0.0


def _due(name: str) -> Term | None:
    for term in _armed.get(name, ()):
        if term.count is None:
            return term
        if term.count > 0:
            term.count -= 1
            return term
    return None

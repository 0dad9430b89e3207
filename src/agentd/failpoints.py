"""Failpoints: named points at which a test makes agentd fail, wait or die.

There is a point at every step that changes something outside: in a store, an engine, a process.
A point does nothing unless AGENTD_FAILPOINTS was set when the program started:

    AGENTD_FAILPOINTS="create.after_engine_create=2*off->kill; intent.before_replace=error(ENOSPC)"

    points  = point { ";" point }
    point   = name "=" term { "->" term }
    term    = [ count "*" ] action            the term counts for so many visits, then the next
    action  = "off" | "kill" | "kill(parent)" | "delay(" milliseconds ")" | "error(" errno ")"

A term without a count applies to all further visits. The notation is a subset of FreeBSD's fail(9).

Imports little, and nothing of agentd: the shim of a process kernel uses it, too.
"""

from __future__ import annotations

import errno
import os
import signal
import time

VARIABLE = "AGENTD_FAILPOINTS"

POINTS = frozenset(
    {
        "start.after_locks",
        "start.after_discover",
        "start.after_recall",
        "start.after_server",
        "start.before_ready",
        "shutdown.before_drain",
        "shutdown.after_drain",
        "shutdown.after_server",
        "shutdown.after_plugins",
        "intent.before_replace",
        "intent.after_replace",
        "record.before_replace",
        "record.after_replace",
        "record.before_move",
        "record.after_move",
        "record.before_drop",
        "record.after_drop",
        "claim.after_commit",
        "claim.before_replace",
        "claim.after_replace",
        "claim.before_drop",
        "claim.after_drop",
        "engines.before_replace",
        "engines.after_replace",
        "devices.before_replace",
        "devices.after_replace",
        "node.before_replace",
        "node.after_replace",
        "create.after_commit",
        "create.after_plan",
        "create.after_pull",
        "create.before_engine_create",
        "create.after_engine_create",
        "create.after_engine_start",
        "create.before_undo",
        "create.after_undo",
        "create.after_record",
        "create.after_group",
        "create.after_spawn",
        "create.after_runtime",
        "shim.after_fork",
        "shim.before_identity",
        "shim.after_identity",
        "shim.after_go",
        "shim.before_answer",
        "shim.before_exit",
        "shim.after_exit",
        "stop.before_runtime",
        "stop.after_term",
        "stop.after_kill",
        "stop.after_runtime",
        "delete.before_runtime",
        "delete.after_rename",
        "delete.after_group",
        "delete.after_runtime",
        "delete.before_answer",
        "adopt.before_list",
        "adopt.after_list",
        "adopt.after_action",
        "adopt.before_discard",
        "adopt.after_discard",
        "reconcile.before_find",
        "reconcile.after_find",
        "reconcile.after_settle",
        "drain.before_save",
        "drain.after_save",
        "plugin.before_spawn",
        "plugin.after_spawn",
        "plugin.after_load",
        "plugin.after_open",
        "plugin.after_list",
        "plugin.before_kill",
        "plugin.after_kill",
    }
)
"""The names of all points; `tests/crash/points.py` says when each is reached."""


class Term:
    """One action and its remaining visits (None: unlimited)."""

    def __init__(self, action: str, argument: str, count: int | None) -> None:
        self.action = action
        self.argument = argument
        self.count = count


_armed: dict[str, list[Term]] = {}
_parent = os.getppid()


def arm(text: str) -> None:
    """Set the points of a text and clear all others.

    Raises:
        ValueError: the text is invalid; the message has the expectation.
    """
    armed = parse_points(text)
    _armed.clear()
    _armed.update(armed)


def parse_points(text: str) -> dict[str, list[Term]]:
    """Parse points without setting them.

    Raises:
        ValueError: the text is invalid; the message has the expectation.
    """
    points: dict[str, list[Term]] = {}
    for point in filter(None, map(str.strip, text.split(";"))):
        name, separator, terms = point.partition("=")
        if not separator or name not in POINTS:
            known = ", ".join(sorted(POINTS))
            raise ValueError(f"invalid failpoint {point!r}: expected POINT=TERM; points: {known}")
        points[name] = [_parse_term(term.strip()) for term in terms.split("->")]
    return points


def armed_points() -> list[str]:
    """Return the names of the set points."""
    return list(_armed)


def inherited_environment() -> dict[str, str]:
    """Return the environment that passes the points on to a program of agentd."""
    text = os.environ.get(VARIABLE)
    return {VARIABLE: text} if text else {}


def _parse_term(text: str) -> Term:
    count, separator, action_text = text.rpartition("*")
    action, _, argument = action_text.removesuffix(")").partition("(")
    is_known = (
        (action == "off" and not argument)
        or (action == "kill" and argument in ("", "parent"))
        or (action == "delay" and argument.isdecimal())
        or (action == "error" and hasattr(errno, argument))
    )
    if not is_known or (separator and not count.isdecimal()):
        allowed = "off, kill, kill(parent), delay(MILLISECONDS), error(ERRNO), each after COUNT*"
        raise ValueError(f"invalid term {text!r}: expected {allowed}")
    return Term(action, argument, int(count) if separator else None)


def hit(name: str) -> None:
    """Visit a point; a delay blocks."""
    if _armed:
        time.sleep(_visit(name))


async def hit_async(name: str) -> None:
    """Visit a point in a coroutine; a delay does not block other tasks."""
    if _armed and (pause_s := _visit(name)):
        import asyncio  # noqa: PLC0415 - the shim has no use for it

        await asyncio.sleep(pause_s)


def _visit(name: str) -> float:
    """Perform the action of this visit, and return the seconds to wait."""
    term = _find_due_term(name)
    if term is None:
        return 0.0
    if term.action == "kill":
        os.kill(_parent if term.argument else os.getpid(), signal.SIGKILL)
    if term.action == "error":
        number = getattr(errno, term.argument)
        raise OSError(number, f"{os.strerror(number)} (failpoint {name})")
    return int(term.argument) / 1000 if term.action == "delay" else 0.0


def _find_due_term(name: str) -> Term | None:
    for term in _armed.get(name, ()):
        if term.count is None:
            return term
        if term.count > 0:
            term.count -= 1
            return term
    return None

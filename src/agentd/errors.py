"""Everything agentd can refuse or fail with.

An error carries its facts as fields and a stable `code`; how a code becomes an
HTTP status or an exit status is decided where that protocol is spoken.

Families: `ConfigRefused` and `StartRefused` stop the start, `RequestError` is
the caller's to mend, `Unavailable` passes with time, `RuntimeFailure` is the
engine's answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import ClassVar

MOST_PROBLEMS = 64
"""Entries of `errors` in one refusal."""
MOST_WHERE, MOST_WHY, MOST_DETAIL = 100, 1000, 4096
"""Characters of a problem's place, of its reason, and of all problems as one text."""
PRIVATE_MEMBERS = frozenset({"env", "command", "labels"})
"""Members of a request with content that only its caller may see; a `why` never quotes them."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where (a key path or a request member), and why.

    The place of an `is_private` one may hold content of `PRIVATE_MEMBERS` whatever it begins with.
    """

    where: str
    why: str
    is_private: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.why}" if self.where else self.why

    def shortened(self) -> Problem:
        """Return the problem with bounded texts: a caller may have sent parts of them."""
        if len(self.where) <= MOST_WHERE and len(self.why) <= MOST_WHY:
            return self
        where, why = _shortened(self.where, MOST_WHERE), _shortened(self.why, MOST_WHY)
        return replace(self, where=where, why=why)

    def published(self) -> str:
        """Return the problem as everybody may read it."""
        head = self.where.partition(".")[0]
        if self.is_private:
            return self.why
        return f"{head}: {self.why}" if head in PRIVATE_MEMBERS else str(self)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


class AgentdError(Exception):
    """Root of all errors; `facts` are the members a caller can rely on."""

    code: ClassVar[str] = "Internal"
    content: Mapping[str, object] = {}
    """The whole problem, where the error was read from an answer."""
    headers: Mapping[str, str] = {}
    """What an answer that is this error says beside it."""

    def facts(self) -> Mapping[str, object]:
        """Return the machine-readable members of this error, JSON-ready."""
        return {}

    def published(self) -> str:
        """Return the message without content of `PRIVATE_MEMBERS`: for lists, events and the log.

        The message itself is for the caller alone.
        """
        return str(self)


class ConfigRefused(AgentdError):
    """The configuration, or the partition it asks for, cannot be used."""

    code = "ConfigRefused"
    source = ""

    def __init__(self, problems: Sequence[Problem], source: str = "") -> None:
        self.problems = tuple(problems)
        self.source = source
        super().__init__("\n".join(self.lines()))

    def facts(self) -> Mapping[str, object]:
        return {"errors": [{"where": p.where, "why": p.why} for p in self.problems]}

    def of(self, source: str) -> ConfigRefused:
        """Return the same with the file that the problems stand in, if none is named yet."""
        return self if self.source else ConfigRefused(self.problems, source)

    def lines(self) -> list[str]:
        """Return one line for each problem, led by the file it stands in."""
        lead = f"{self.source}: " if self.source else ""
        return [f"{lead}{problem}" for problem in self.problems]


class StartRefused(AgentdError):
    """The daemon cannot start here, for a reason outside its configuration."""

    code = "StartRefused"


class DaemonFailed(AgentdError):
    """The daemon stopped because of an error of its own."""

    code = "DaemonFailed"


class RequestError(AgentdError):
    """The caller asked for something that will not work however often it is tried."""


class _ListedRequestError(RequestError):
    """A request error with one entry for each invalid member, up to `MOST_PROBLEMS`."""

    _more: Sequence[str] = ()

    def __init__(self, problems: Iterable[Problem]) -> None:
        found = [problem.shortened() for problem in islice(problems, MOST_PROBLEMS + 1)]
        self.problems = tuple(found[:MOST_PROBLEMS])
        if len(found) > MOST_PROBLEMS:
            self._more = ("and more",)
        super().__init__(self._text(str(problem) for problem in self.problems))

    def _text(self, problems: Iterable[str]) -> str:
        return _shortened("; ".join([*problems, *self._more]), MOST_DETAIL)

    def facts(self) -> Mapping[str, object]:
        return {"errors": [{"where": p.where, "why": p.why} for p in self.problems]}

    def published(self) -> str:
        return self._text(problem.published() for problem in self.problems)


class InvalidRequest(_ListedRequestError):
    """The request is malformed, or asks for what this node's runtime cannot do."""

    code = "InvalidRequest"


class InvalidSlotAmount(_ListedRequestError):
    """An amount is not one that the slot can be asked for."""

    code = "InvalidSlotAmount"


class InvalidSlotCombination(_ListedRequestError):
    """Slots that exclude each other were asked for together."""

    code = "InvalidSlotCombination"


class UnsupportedResource(RequestError):
    """The request names slots this node does not know, with amounts that are not zero.

    `plugins` holds the reasons of failed plugins that would offer them, `absent` those of plugins
    whose hardware this node does not have: a fact, but the message says only that it is so.
    """

    code = "UnsupportedResource"

    def __init__(
        self,
        slots: Iterable[str],
        known: Iterable[str],
        plugins: Mapping[str, str],
        who: str = "this node",
        absent: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.slots = sorted(slots)
        self.known = sorted(known)
        self.plugins = {**plugins, **absent}
        why = "".join(f"; plugin {name} failed: {why}" for name, why in plugins.items())
        why += "".join(f"; plugin {name}: no such hardware on this node" for name in absent)
        shown = [_shortened(name, MOST_WHERE) for name in self.slots[:MOST_PROBLEMS]]
        if len(self.slots) > MOST_PROBLEMS:
            shown.append("and more")
        super().__init__(
            f"unknown slots: {', '.join(shown)} ({who} has: {', '.join(self.known)}){why}"
        )

    def facts(self) -> Mapping[str, object]:
        return {"slots": self.slots, "known_slots": self.known, "plugins": self.plugins}


class InsufficientResource(RequestError):
    """The agent's devices cannot give this amount now; `explain` says why, device by device."""

    code = "InsufficientResource"

    def __init__(
        self,
        slot: str,
        requested: str,
        free: str,
        explain: Sequence[Mapping[str, object]],
        limit: str = "",
        *,
        total: str = "",
        never: str | None = None,
    ) -> None:
        """`total` is what the devices can give at most, `never` why it can never fit, if so."""
        self.slot = slot
        self.requested = requested
        self.free = free
        self.explain = tuple(explain)
        self.limit = limit
        why = f"; {limit}" if limit else ""
        if never is not None:
            why += "".join(f"; {part}" for part in (never, "this can never fit") if part)
        free = f"{free} free ({total} in total)" if total else f"{free} free"
        super().__init__(f"insufficient {slot}: requested {requested}, {free}{why}")

    def facts(self) -> Mapping[str, object]:
        return {
            "slot": self.slot,
            "requested": self.requested,
            "free": self.free,
            "explain": [dict(row) for row in self.explain],
            **({"reason": "limit"} if self.limit else {}),
        }


class KernelConflict(RequestError):
    """The kernel exists with another request, or is in a state that forbids the call."""

    code = "KernelConflict"


class ClaimConflict(RequestError):
    """The claim exists with another request, or is in a state that forbids the call."""

    code = "ClaimConflict"


class TooManyClaims(RequestError):
    """The node has as many claims as it may have."""

    code = "TooManyClaims"


class Conflict(RequestError):
    """A device, plugin or runtime is in a state that forbids the call."""

    code = "Conflict"


class ImageNotFound(RequestError):
    """The image is neither on the node nor to be had from its registry."""

    code = "ImageNotFound"


class CommandNotFound(RequestError):
    """The command does not exist, or cannot be executed, where the kernel runs."""

    code = "CommandNotFound"

    def published(self) -> str:
        return "the command does not exist, or cannot be executed"


class UnknownAgent(RequestError):
    """No agent of that name on this node."""

    code = "UnknownAgent"


class UnknownKernel(RequestError):
    """No kernel of that name on this node."""

    code = "UnknownKernel"


class UnknownClaim(RequestError):
    """No claim of that name on this node."""

    code = "UnknownClaim"


class UnknownEngine(RequestError):
    """No engine of that name on this node."""

    code = "UnknownEngine"


class UnknownRuntime(RequestError):
    """No runtime of that name on this node."""

    code = "UnknownRuntime"


class UnknownPlugin(RequestError):
    """No plugin of that name on this node."""

    code = "UnknownPlugin"


class UnknownNode(RequestError):
    """The fleet has not heard of a node of that name."""

    code = "UnknownNode"


class UnknownSlotType(RequestError):
    """The fleet knows no slot of that name."""

    code = "UnknownSlotType"


class SlotTypeInUse(RequestError):
    """A slot cannot be forgotten while nodes offer it."""

    code = "SlotTypeInUse"


class UnknownDevice(RequestError):
    """No device of that name on this node."""

    code = "UnknownDevice"


class Forbidden(RequestError):
    """The caller sees this, and its role may not do it; `roles` may."""

    code = "Forbidden"

    def __init__(self, caller: str, role: str, right: str, roles: Sequence[str]) -> None:
        self.roles = list(roles)
        super().__init__(
            f'{caller}: role "{role}" lacks the right "{right}"'
            f" (required: {' or '.join(self.roles)})"
        )

    def facts(self) -> Mapping[str, object]:
        return {"roles": self.roles}


class TooManyStreams(RequestError):
    """The caller has as many logs and event streams open as one may have."""

    code = "TooManyStreams"


class RequestTimeout(RequestError):
    """The caller did not send all of its request in time."""

    code = "RequestTimeout"


class RuntimeFailure(AgentdError):
    """The runtime refused or failed, and said so."""

    code = "RuntimeFailure"

    def published(self) -> str:
        return str(self).partition(' exec: "')[0]  # runc quotes the command there


class Unavailable(AgentdError):
    """Not now; the same call may work after `retry_after_s` seconds."""

    retry_after_s: ClassVar[int] = 2


class PluginUnavailable(Unavailable):
    """The plugin that offers this slot has not opened yet."""

    code = "PluginUnavailable"


class RuntimeUnavailable(Unavailable):
    """The runtime cannot be reached; that says nothing about its kernels."""

    code = "RuntimeUnavailable"


class OutcomeUnknown(RuntimeUnavailable):
    """The runtime was asked and its answer was lost: it may yet have acted."""


class StateUnavailable(Unavailable):
    """The state folder cannot be written: what cannot be remembered is not promised."""

    code = "StateUnavailable"


class Unreachable(Unavailable):
    """No daemon answers there, or not in time; only clients raise it."""

    code = "Unreachable"


class Refused(AgentdError):
    """An answer that is an error without a class of its own; only clients raise it."""

    def __init__(self, code: str, detail: str, content: Mapping[str, object]) -> None:
        self.code = code  # type: ignore[misc]
        self.content = dict(content)
        super().__init__(detail)


class NotReady(Unavailable):
    """The daemon has not finished starting."""

    code = "NotReady"


class NodeUnavailable(Unavailable):
    """A node of the fleet cannot be asked now: what it holds it still holds."""

    code = "NodeUnavailable"


class Draining(Unavailable):
    """The daemon is stopping and takes no new work."""

    code = "Draining"

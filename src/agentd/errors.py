"""The errors of agentd.

An error carries its facts as fields and a stable `code`. The layer of each protocol maps a code to
an HTTP status or an exit status.

Families: `ConfigRefused` and `StartRefused` stop the start, a `RequestError` fails however often
it is repeated here, `Unavailable` is temporary, `RuntimeFailure` is the engine's answer. Whether
another node may help is the `scope` of a code (`agentd.error_codes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self

from agentd.error_codes import ERROR_CODES, Scope

MAX_PROBLEMS = 64
"""Maximum entries of `errors` in one refusal."""
MAX_WHERE, MAX_WHY, MAX_DETAIL = 100, 1000, 4096
"""Maximum characters of a problem's location, of its reason, and of all problems as one text."""
_SERVER_ERROR, _UNAVAILABLE = 500, 503
PRIVATE_MEMBERS = frozenset({"env", "command", "entrypoint", "labels"})
"""Members of a request with content that only its caller may see; reasons never quote them."""


class Problem(NamedTuple):
    """One problem: its location (a key path or a request member) and its reason.

    An `is_private` location may contain content of `PRIVATE_MEMBERS`, however it begins.
    """

    where: str
    why: str
    is_private: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.why}" if self.where else self.why

    def truncated(self) -> Problem:
        """Return the problem with shortened texts, which a client may have sent."""
        if len(self.where) <= MAX_WHERE and len(self.why) <= MAX_WHY:
            return self
        where, reason = _truncate(self.where, MAX_WHERE), _truncate(self.why, MAX_WHY)
        return self._replace(where=where, why=reason)

    def published(self) -> str:
        """Return the problem without private content."""
        head = self.where.partition(".")[0]
        if self.is_private:
            return self.why
        return f"{head}: {self.why}" if head in PRIVATE_MEMBERS else str(self)


def _truncate(text: str, maximum: int) -> str:
    return text if len(text) <= maximum else f"{text[: maximum - 1]}…"


def _restore(kind: type[AgentdError], args: tuple[object, ...]) -> AgentdError:
    """Return an error whose members are not set yet."""
    error = kind.__new__(kind)
    error.args = args
    return error


class AgentdError(Exception):
    """Root of all errors; `facts` are the members a caller can rely on."""

    code: ClassVar[str] = "Internal"
    content: Mapping[str, object] = {}
    """The whole problem, if the error was parsed from an answer."""
    headers: Mapping[str, str] = {}
    """Headers of an answer with this error."""
    kernel_id = claim_id = ""
    """The id of a create, in every error of a client's `create_kernel` and `create_claim`."""
    is_local = False
    """Whether this node's settings, runtime or host are the cause, whatever the code is about."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the members, without the arguments that made them."""
        return _restore, (type(self), self.args), vars(self)

    @property
    def scope(self) -> Scope:
        """The concern of the failure; a code of a newer version is a refusal by its node."""
        if self.is_local or self.content.get("scope") == Scope.NODE:
            return Scope.NODE
        if (row := ERROR_CODES.get(self.code)) is not None:
            return row.scope
        status = self.content.get("status")
        if status == _UNAVAILABLE:
            return Scope.MOMENT
        is_refused = isinstance(status, int) and status < _SERVER_ERROR
        return Scope.NODE if is_refused else Scope.UNKNOWN

    def facts(self) -> Mapping[str, object]:
        """Return the machine-readable members of this error, JSON-ready."""
        return {}

    def mark_local(self) -> None:
        """Note that this node is the cause."""
        self.is_local = True

    def members(self) -> dict[str, object]:
        """Return the facts, and the scope if it is not that of the code."""
        return {**self.facts(), **({"scope": Scope.NODE.value} if self.is_local else {})}

    def public_text(self) -> str:
        """Return the message without content of `PRIVATE_MEMBERS`: for lists, events and the log.

        The message itself is for the caller alone.
        """
        return str(self)


def public_reason(error: BaseException) -> str:
    """Return the public text of an error, or the message of one that is not agentd's."""
    text = error.public_text() if isinstance(error, AgentdError) else str(error)
    return text or type(error).__name__


class ConfigRefused(AgentdError):
    """The configuration, or the partition it describes, is unusable."""

    code = "ConfigRefused"
    source = ""

    def __init__(self, problems: Sequence[Problem], source: str = "") -> None:
        self.problems = tuple(problems)
        self.source = source
        super().__init__("\n".join(self.lines()))

    def facts(self) -> Mapping[str, object]:
        return {"errors": [{"where": p.where, "why": p.why} for p in self.problems]}

    def with_source(self, source: str) -> ConfigRefused:
        """Return the error with its file, unless it has one already."""
        return self if self.source else ConfigRefused(self.problems, source)

    def lines(self) -> list[str]:
        """Return one line for each problem, after the name of its file."""
        lead = f"{self.source}: " if self.source else ""
        return [f"{lead}{problem}" for problem in self.problems]


class StartRefused(AgentdError):
    """The daemon cannot start, for a reason outside its configuration."""

    code = "StartRefused"


class DaemonFailed(AgentdError):
    """The daemon stopped because of an internal error."""

    code = "DaemonFailed"


class RequestError(AgentdError):
    """The request will fail on this node however often it is repeated."""


class _ListedRequestError(RequestError):
    """A request error with one entry for each invalid member, up to `MAX_PROBLEMS`."""

    _more: Sequence[str] = ()

    def __init__(self, problems: Iterable[Problem], *, is_local: bool = False) -> None:
        self.is_local = is_local
        listed = [problem.truncated() for problem in islice(problems, MAX_PROBLEMS + 1)]
        self.problems = tuple(listed[:MAX_PROBLEMS])
        if len(listed) > MAX_PROBLEMS:
            self._more = ("and more",)
        super().__init__(self._text(str(problem) for problem in self.problems))

    def _text(self, problems: Iterable[str]) -> str:
        return _truncate("; ".join([*problems, *self._more]), MAX_DETAIL)

    def facts(self) -> Mapping[str, object]:
        return {"errors": [{"where": p.where, "why": p.why} for p in self.problems]}

    def public_text(self) -> str:
        return self._text(problem.published() for problem in self.problems)


class InvalidRequest(_ListedRequestError):
    """The request is malformed, or this node's runtime cannot fulfil it."""

    code = "InvalidRequest"


class InvalidSlotAmount(_ListedRequestError):
    """An amount is invalid for its slot."""

    code = "InvalidSlotAmount"


class InvalidSlotCombination(_ListedRequestError):
    """The request combines slots that exclude each other."""

    code = "InvalidSlotCombination"


class UnsupportedResource(RequestError):
    """The request has non-zero amounts of slots that this node does not know.

    `plugins` holds the reasons of failed plugins that would offer them, `absent` those of plugins
    without hardware on this node; the message only names the latter.
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
        reason = "".join(f"; plugin {name} failed: {reason}" for name, reason in plugins.items())
        reason += "".join(f"; plugin {name}: no such hardware on this node" for name in absent)
        names = [_truncate(name, MAX_WHERE) for name in self.slots[:MAX_PROBLEMS]]
        if len(self.slots) > MAX_PROBLEMS:
            names.append("and more")
        super().__init__(
            f"unknown slots: {', '.join(names)} ({who} has: {', '.join(self.known)}){reason}"
        )

    def facts(self) -> Mapping[str, object]:
        return {"slots": self.slots, "known_slots": self.known, "plugins": self.plugins}


class InsufficientResource(RequestError):
    """The agent's devices cannot serve this amount now; `explain` has the reason by device."""

    code = "InsufficientResource"

    def __init__(
        self,
        slot: str,
        requested: str,
        free: str,
        explain: Sequence[Mapping[str, object]],
        limit: str = "",
        *,
        amounts: str = "",
        never: str | None = None,
    ) -> None:
        """Create the error; `amounts` are the amounts for people, `never` why it can never fit."""
        self.slot = slot
        self.requested = requested
        self.free = free
        self.explain = tuple(explain)
        self.limit = limit
        reason = f"; {limit}" if limit else ""
        if never is not None:
            reason += "".join(f"; {part}" for part in (never, "this can never fit") if part)
        amounts = amounts or f"requested {requested}, {free} free"
        super().__init__(f"insufficient {slot}: {amounts}{reason}")

    def facts(self) -> Mapping[str, object]:
        return {
            "slot": self.slot,
            "requested": self.requested,
            "free": self.free,
            "explain": [dict(row) for row in self.explain],
            **({"reason": "limit"} if self.limit else {}),
        }


class KernelConflict(RequestError):
    """The kernel exists with another request, or its state forbids the call."""

    code = "KernelConflict"

    @classmethod
    def of_other(cls, kernel_id: str, other: Literal["request", "attempt"]) -> Self:
        """Return the refusal of a create whose id is taken."""
        remedy = "use another id, or delete it"
        return cls(f"kernel {kernel_id} exists, and another {other} created it; {remedy}")


class ClaimConflict(RequestError):
    """The claim exists with another request, or is in a state that forbids the call."""

    code = "ClaimConflict"


class TooManyClaims(RequestError):
    """The node or the agent has its maximum of claims, or the claim's labels exceed a bound."""

    code = "TooManyClaims"


class Conflict(RequestError):
    """The state of a device, plugin or runtime forbids the call."""

    code = "Conflict"


class ImageNotFound(RequestError):
    """The image does not exist, this node may not pull it, or it is for another platform."""

    code = "ImageNotFound"


class CommandNotFound(RequestError):
    """The command does not exist in the kernel, or is not executable."""

    code = "CommandNotFound"

    def public_text(self) -> str:
        return "the command does not exist or is not executable"


class UnknownAgent(RequestError):
    """The agent does not exist on this node."""

    code = "UnknownAgent"


class UnknownKernel(RequestError):
    """The kernel does not exist on this node."""

    code = "UnknownKernel"


class UnknownClaim(RequestError):
    """The claim does not exist on this node."""

    code = "UnknownClaim"

    @classmethod
    def of(cls, claim_id: str) -> Self:
        """Return the error for an id without a claim that the caller may see."""
        return cls(f"unknown claim {claim_id}")


class UnknownEngine(RequestError):
    """The engine does not exist on this node."""

    code = "UnknownEngine"


class UnknownRuntime(RequestError):
    """The runtime does not exist on this node."""

    code = "UnknownRuntime"


class UnknownPlugin(RequestError):
    """The plugin does not exist on this node."""

    code = "UnknownPlugin"


class UnknownNode(RequestError):
    """The node does not exist in this fleet."""

    code = "UnknownNode"


class UnknownSlotType(RequestError):
    """The slot does not exist in this fleet."""

    code = "UnknownSlotType"


class SlotTypeInUse(RequestError):
    """The slot cannot be forgotten while nodes offer it."""

    code = "SlotTypeInUse"


class UnknownDevice(RequestError):
    """The device does not exist on this node."""

    code = "UnknownDevice"


class Forbidden(RequestError):
    """The caller's role lacks a right; `roles` have it."""

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
    """The caller has reached the maximum of open streams of logs, events and execs."""

    code = "TooManyStreams"


class RequestTimeout(RequestError):
    """The client did not send the whole request in time."""

    code = "RequestTimeout"


class RuntimeFailure(AgentdError):
    """The runtime returned an error."""

    code = "RuntimeFailure"

    def public_text(self) -> str:
        return str(self).partition(' exec: "')[0]  # runc quotes the command after this


class Unavailable(AgentdError):
    """A temporary failure; the same call may succeed after `retry_after_s` seconds."""

    retry_after_s: int = 2


class PluginUnavailable(Unavailable):
    """The plugin that offers this slot has not opened yet, or was lost."""

    code = "PluginUnavailable"


class RuntimeUnavailable(Unavailable):
    """The runtime, or what it needs of the host, does not answer; no kernel was created."""

    code = "RuntimeUnavailable"


class CoresUnavailable(RuntimeUnavailable):
    """A kernel cannot run on these `cores`, none if it is unknown which; none was created."""

    def __init__(self, cores: Iterable[str], reason: str) -> None:
        self.cores = tuple(cores)
        which = f"cores {', '.join(self.cores)}" if self.cores else "its cores"
        super().__init__(f"the kernel did not start on {which}: {reason}")


class OutcomeUnknown(Unavailable):
    """The runtime was called and its answer was lost: the kernel may exist."""

    code = "OutcomeUnknown"

    def __init__(self, detail: str = "", kernel_id: str = "") -> None:
        self.kernel_id = kernel_id
        super().__init__(detail)

    def facts(self) -> Mapping[str, object]:
        return {"kernel_id": self.kernel_id}


class ImageUnavailable(Unavailable):
    """The image cannot be pulled now: its registry is overloaded, fails or cannot be reached."""

    code = "ImageUnavailable"
    retry_after_s = 10

    def __init__(self, detail: str = "", retry_after_s: int | None = None) -> None:
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s
        super().__init__(detail)


class StateUnavailable(Unavailable):
    """A disk of the node is full, or the state folder cannot be read or written."""

    code = "StateUnavailable"


class Unreachable(Unavailable):
    """No daemon answers, or not in time; raised by clients only."""

    code = "Unreachable"


class AnswerLost(Unreachable):
    """A call was sent and its answer is missing: the daemon may have carried it out."""


class OutputDropped(AgentdError):
    """Bytes of a log, from `begin` to before `end`, are lost; raised by clients only."""

    code = "OutputDropped"

    def __init__(self, kernel_id: str = "", begin: int = 0, end: int = 0) -> None:
        self.kernel_id, self.begin, self.end = kernel_id, begin, end
        lost = f"{end - begin} bytes of the log of {kernel_id} were dropped"
        super().__init__(f"{lost}: those from {begin} to {end}")

    def facts(self) -> Mapping[str, object]:
        return {"kernel_id": self.kernel_id, "begin": self.begin, "end": self.end}


class Refused(AgentdError):
    """An error answer without a class of its own; raised by clients only."""

    def __init__(self, code: str, detail: str, content: Mapping[str, object]) -> None:
        self.code = code  # type: ignore[misc]
        self.content = dict(content)
        super().__init__(detail)


class RefusedForNow(Refused, Unavailable):
    """A `Refused` of status 503, such as a code of a newer version; raised by clients only."""


class NotReady(Unavailable):
    """The daemon has not finished starting, or the host does not know a user or a group yet."""

    code = "NotReady"

    def __init__(self, detail: str = "", *, is_local: bool = False) -> None:
        """Create the error; `is_local` if the host lacks something, not if the daemon starts."""
        self.is_local = is_local
        super().__init__(detail)


class NodeUnavailable(Unavailable):
    """A node of the fleet does not answer; its kernels may be running."""

    code = "NodeUnavailable"


class Draining(Unavailable):
    """The daemon is stopping and takes no new work."""

    code = "Draining"

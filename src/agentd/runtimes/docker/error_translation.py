"""Translation of the engine's errors to errors of agentd."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from agentd.core.kernel.plan import KernelPlan
from agentd.core.names import quote_untrusted
from agentd.errors import (
    AgentdError,
    CommandNotFound,
    CoresUnavailable,
    ImageNotFound,
    ImageUnavailable,
    InvalidRequest,
    OutcomeUnknown,
    Problem,
    RuntimeFailure,
    RuntimeUnavailable,
    StateUnavailable,
    public_reason,
)
from agentd.host.probe import parse_cpu_list
from agentd.runtimes.docker.container_config import container_options, program_of
from agentd.runtimes.docker.docker_errors import (
    MAX_DETAIL_BYTES,
    DockerError,
    DockerResponseLost,
    DockerUnreachable,
    hide_paths,
)
from agentd.runtimes.docker.mounts import MountSource
from agentd.runtimes.docker.request_errors import request_problem

_REMOVED = "its container was removed outside of agentd"
_CONFLICTS = {
    "port is already allocated": "",
    "address already in use": "",
    "no such container": _REMOVED,
    "marked for removal": _REMOVED,
}
"""Conflicts with other processes and clients, such as a prune, and their meaning; a retry helps."""

_NODE_REFUSALS = ("error mounting", "hook")
"""Refusals of a start that concern the node's devices, if not a target of the request."""
_SYSTEM_FOLDERS = ("/bin", "/dev", "/etc", "/lib", "/proc", "/sbin", "/sys", "/usr")
"""Folders that are the same on every node; other paths tell where an engine keeps its data."""
_NO_CORES = re.compile(
    r"^requested cpus are not available|\bwrit(?:e|ing file) `?/sys/fs/cgroup/\S*/cpuset\.cpus\b"
)
"""Refusals of cores: of the Engine for one that is offline, of runc and crun for a cpuset."""
_AVAILABLE_CORES = re.compile(r"available: ((?:\d{1,5}(?:-\d{1,5})?,?)+)")
_SOURCE = "source path does not exist: "
"""The begin of a mount's real source, which its owner named, in a message; it has no quotes."""
_RLIMIT = "error setting rlimit"
"""The refusal of a limit: the node's default, if not one of the request."""
_NO_COMMAND_CODES = (126, 127)
"""Exit codes that the engine gives a container whose command is not executable, or missing."""
BAD_REQUEST, NOT_FOUND, CONFLICT = 400, 404, 409

_DISK = re.compile(
    "(?:^|(?<!\0)(?<!\0'): )(?:(no space left on device|disk quota exceeded)"
    r"|read-only file system|input/output error)(?:: (?:unknown|oci runtime error))?\Z"
)
"""The end of a message about a disk, if not that of a `_NAMED` path; group 1 is a full one."""
_OWN_STEP = re.compile(
    r"(?:pulling \S+: |error creating temporary lease: |copying system image[^:]*: )?(?:"
    "(?:write|open|mkdir|rename|sync) |failed to (?:register|extract) layer|failed to unpack "
    "|failed to copy: failed to send write: |writing blob: )"
)
"""The begin of what an engine says of its own disk in a pull; a registry's words follow others."""
_NO_DISK = re.compile(
    "keyring|session key|inotify|namespace|fork/exec|cgroup|/dev/|/proc/sys/|hook #|error mounting"
)
"""Words of other limits of Linux, of devices and of mounts, in a refused create or start."""
_RATE_LIMIT = re.compile("too ?many ?requests|rate limit|rate exceeded")
_IMAGE_REFUSED = re.compile(
    "(?:manifest|name) unknown"
    "|(?:manifest for|repository|resolve reference|platform).{0,500} not found"
    "|(?<!permission )denied(?:: |$)|access denied|unauthorized|authentication required"
    "|no basic auth|invalid reference|must be lowercase|short-name|no matching manifest"
    "|no image found|not match the specified platform|on this platform"
    "|(?:manifest|media type).{0,500}(?:not|no longer) supported|schema 1 support is disabled"
    "|(?:http|status).{0,500}\\b40[134]\\b"
)
"""Texts of pulls that fail however often they are repeated; the last is a registry's status."""
_NODE_CONTENT = re.compile("content (?:digest|store)|blob not found")
"""Texts of an image store that has lost a part of an image, which is "not found" as well."""
_COMMAND = 'exec: "'
"""The begin of a command in a message; what follows may repeat its words without quotes."""
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|(?<!writing file )`[^`]*`|https?://\S+')
"""Texts of others in an engine's message: names of images, paths, addresses."""
_NAMED, _IN_CONTAINER = "\0", re.compile("`[^/`][^`]*`")
"""The marker of a request's paths, and a path that crun opens below a container's root."""
_REFUSED_STATUSES = (400, 401, 403, 404)
"""Statuses of an engine that knows why a pull failed; one of 20.10 always answers 500."""
_RETRY_AFTER = re.compile(r"retry[- ]after:? *(\d{1,9}(?:\.\d+)?)(ms|µs|us|ns|m|h)?")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "m": 60.0, "h": 3600.0}
_RATE_LIMIT_RETRY_S, _MAX_RETRY_S = 60, 3600
"""Seconds until a retry after a rate limit without a time, and at most."""


def unknown_outcome_error(plan: KernelPlan, error: BaseException) -> OutcomeUnknown:
    """Return the error that keeps a kernel's share held until the outcome is known."""
    kernel_id = plan.spec.kernel_id
    reason = public_reason(translate_error(error, plan))
    return OutcomeUnknown(f"no answer from the engine; kernel {kernel_id} may exist: {reason}")


def translate_error(
    error: BaseException,
    plan: KernelPlan | None = None,
    exit_code: int = 0,
    sources: Iterable[MountSource] = (),
) -> BaseException:
    """Translate an error of the engine; other errors are returned unchanged.

    `exit_code` is that of a container whose start was refused, and `sources` are those of its
    mounts, which the engine names instead of links to them.
    """
    if isinstance(error, DockerError):
        if plan is not None:
            named = [*_named_paths(plan), *(source.path for source in sources)]
            return _translate_refused_create(error, plan, named, exit_code)
        return _translate_refusal(_own_words(error.detail), error.message)
    if isinstance(error, (DockerUnreachable, DockerResponseLost, OSError, TimeoutError)):
        return RuntimeUnavailable(str(error) or type(error).__name__)
    return error


def _own_words(message: str, named: Iterable[str] = ()) -> str:
    """Return a message in lower case without the words of others, which decide nothing.

    Paths that a request `named`, and those below a container's root as crun names them, leave a
    marker.
    """
    text = message.partition(_SOURCE)[0].partition(_COMMAND)[0]
    for path in sorted(named, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(path)}(?![\w/.-])", _NAMED, text)
    text = _IN_CONTAINER.sub(_NAMED, text)
    return _QUOTED.sub(lambda quoted: _NAMED if _NAMED in quoted[0] else "", text).lower()


def _translate_refused_create(
    error: DockerError, plan: KernelPlan, named: Sequence[str], exit_code: int
) -> BaseException:
    if problem := request_problem(error.detail, plan.spec):
        return InvalidRequest([problem])
    words, is_bad_request = _own_words(error.detail, named), error.status == BAD_REQUEST
    is_of_disk = not is_bad_request and not _NO_DISK.search(error.detail.lower())
    if is_of_disk and (reason := _disk_reason(words)):
        return StateUnavailable(reason)
    message = hide_paths(error.detail, [*_SYSTEM_FOLDERS, *named])
    if _NO_CORES.search(words):
        return CoresUnavailable(_lost_cores(words, plan.cpus), message)
    if not any(text in words for text in _NODE_REFUSALS):
        if exit_code in _NO_COMMAND_CODES:
            program = program_of(plan.spec)
            command = quote_untrusted(program) if program else "of the image"
            return CommandNotFound(f"command {command}: {error.message}")
        if is_bad_request:
            return InvalidRequest([Problem("", message)])
    return _translate_refusal(words, message)


def _lost_cores(words: str, asked: Sequence[str]) -> Sequence[str]:
    """Return which of the cores an engine lacks; none if it does not tell which of several."""
    if found := _AVAILABLE_CORES.search(words):
        available = {str(core) for core in parse_cpu_list(found[1])}
        return [core for core in asked if core not in available]
    return asked if len(asked) == 1 else ()


def _translate_refusal(words: str, message: str) -> BaseException:
    for text, meaning in _CONFLICTS.items():
        if text in words:
            return RuntimeUnavailable(meaning or message)
    failed = " cannot set a default ulimit" if _RLIMIT in words else ""
    return RuntimeFailure(f"the Docker Engine{failed}: {message}")


def _named_paths(plan: KernelPlan) -> Iterator[str]:
    """Yield the paths that a request, or its devices, named."""
    spec, options = plan.spec, container_options(plan.spec)
    words = (*spec.command, *(options.entrypoint or ()), spec.working_dir or "")
    yield from (word for word in words if word.startswith("/"))
    for mount in (*spec.mounts, *plan.edits.mounts):
        yield from (mount.source, mount.target)
    yield from (tmpfs.target for tmpfs in options.tmpfs)
    yield from (node.host_path for node in plan.edits.device_nodes)


def _disk_reason(words: str) -> str:
    """Return what an engine's words say of its disk, "" for nothing."""
    if (found := _DISK.search(words.strip())) is None:
        return ""
    return f"the disk of the node's engine is {'full' if found[1] else 'not writable'}"


def translate_failed_pull(image: str, message: str, status: int = 0) -> AgentdError:
    """Return the error for a pull that an engine, or a registry behind it, has refused.

    A failure passes unless its text says otherwise. `status` is that of the engine, if it has any.
    """
    message = message[:MAX_DETAIL_BYTES].strip()
    text, words = message.lower(), _own_words(message)
    if _OWN_STEP.match(words) and (reason := _disk_reason(words)):
        return StateUnavailable(f"image {image}: {reason}")
    detail = f"image {image}: {hide_paths(message)}"
    if _RATE_LIMIT.search(text):
        return ImageUnavailable(detail, _retry_after_s(text))
    if _NODE_CONTENT.search(text):
        return ImageUnavailable(detail)
    if status in _REFUSED_STATUSES or _IMAGE_REFUSED.search(words):
        return ImageNotFound(detail)
    return ImageUnavailable(detail)


def _retry_after_s(text: str) -> int:
    """Return the pause that a registry asks for, as far as its engine passes it on."""
    if (found := _RETRY_AFTER.search(text)) is None:
        return _RATE_LIMIT_RETRY_S
    seconds = float(found[1]) * _SECONDS.get(found[2], 1.0)
    return min(max(1, math.ceil(seconds)), _MAX_RETRY_S)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate the engine's errors to those of agentd."""
    try:
        yield
    except (DockerError, DockerUnreachable, DockerResponseLost, OSError, TimeoutError) as error:
        raise translate_error(error) from error


@contextmanager
def errors_as_unavailable() -> Iterator[None]:
    """Translate every error except "not found" to `RuntimeUnavailable`: it proves nothing."""
    try:
        with translate_errors():
            yield
    except RuntimeFailure as error:
        raise RuntimeUnavailable(f"the engine failed: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RuntimeUnavailable(f"unexpected response of the engine: {error!r}") from error


@contextmanager
def suppress_not_found() -> Iterator[None]:
    """Suppress "not found"."""
    try:
        yield
    except DockerError as error:
        if error.status != NOT_FOUND:
            raise

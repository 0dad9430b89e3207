"""Kernels as containers of a Docker Engine.

The labels of a container are authoritative. A container is a kernel if it has the name that its
labels demand, or if its labels do not come from its image: an image made from a kernel inherits the
labels, and a container of that image is not a kernel. Only "not found" proves that a container does
not exist; every other error is a state of the engine.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from agentd.concurrency import complete_shielded
from agentd.config.runtimes import DockerSettings
from agentd.core.kernel.exec_spec import ExecSpec
from agentd.core.kernel.observation import Listing, ObservedKernel
from agentd.core.kernel.options import TOO_LONG, is_too_long
from agentd.core.kernel.plan import KernelPlan, kernel_name
from agentd.core.kernel.states import Kernel, KernelRef, KernelSpec, KernelState
from agentd.core.kernel.usage import UsageReading
from agentd.core.names import quote_untrusted
from agentd.errors import (
    CommandNotFound,
    ImageNotFound,
    InvalidRequest,
    Problem,
    RuntimeUnavailable,
    StateUnavailable,
)
from agentd.failpoints import hit_async
from agentd.host.cgroups.usage import read_usages
from agentd.host.groups import group_problems, with_group_ids
from agentd.host.lookups import Lookups
from agentd.runtimes.docker.container_config import (
    CONTAINER_MEMBERS,
    UNPUBLISHED_NETWORKS,
    PullPolicy,
    container_config,
    container_options,
    network_of,
    program_of,
    request_problems,
)
from agentd.runtimes.docker.container_observer import (
    INSPECT_TIMEOUT_S,
    LIST_TIMEOUT_S,
    ContainerObserver,
)
from agentd.runtimes.docker.docker_client import CALL_TIMEOUT_S, DockerClient, parse_container_id
from agentd.runtimes.docker.docker_errors import DockerError, DockerResponseLost, DockerUnreachable
from agentd.runtimes.docker.docker_exec import kill_orphaned_execs, start_docker_exec
from agentd.runtimes.docker.docker_facts import DockerFacts, parse_docker_facts
from agentd.runtimes.docker.docker_streams import (
    CONNECTED,
    CREATE_ACTIONS,
    DESTROY,
    ContainerLog,
    watch_container_events,
)
from agentd.runtimes.docker.error_translation import (
    CONFLICT,
    NOT_FOUND,
    errors_as_unavailable,
    suppress_not_found,
    translate_error,
    translate_errors,
    unknown_outcome_error,
)
from agentd.runtimes.docker.images import Images
from agentd.runtimes.docker.inspection import verify_container
from agentd.runtimes.docker.last_seen import OutageLog
from agentd.runtimes.docker.mounts import MountSource, refuse_missing, resolve_sources
from agentd.runtimes.docker.request_errors import foreign_image_reason
from agentd.runtimes.log_positions import LogPositions
from agentd.services.protocols import (
    CreateProgress,
    CreateUndone,
    KernelLog,
    LogQuery,
    Session,
    Support,
)


class _Attempt:
    """One create in progress; mounts are resolved before each request to the engine.

    Its container `may_exist` from the first request until the engine refuses or removes it.
    """

    def __init__(self, plan: KernelPlan, facts: DockerFacts, settings: DockerSettings) -> None:
        self.plan = plan
        self.options = container_options(plan.spec)
        self.sources: list[MountSource] = []
        self.config: dict[str, Any] = {}
        self.may_exist = False
        self.container_id = ""
        self._facts = facts
        self.settings = settings

    def set_sources(self, sources: list[MountSource]) -> None:
        """Build the engine's request from freshly resolved mounts."""
        self.sources = sources
        self.config = container_config(self.plan, self.settings, self.sources, self._facts)


_SOURCES = "a mount's source"
_NO_NETWORK = re.compile("^network .* not found|network not found")
"""Engines answer 404 for it as they do for an image, or its platform."""
_POSITIONS = ".positions.json"
DISK_PAUSE_S = 60.0
"""Seconds for which a full disk is shown after a create, unless another one finds room."""
MINIMUM_BYTES = 6 * 2**20
"""The engine refuses less (Engine 20.10, "Minimum memory limit allowed is 6MB")."""


class DockerRuntime:
    """The docker runtime; see `agentd.services.protocols.Runtime`."""

    name = "docker"
    minimum_memory_bytes = MINIMUM_BYTES
    unlimited = ""
    members = CONTAINER_MEMBERS

    def __init__(
        self,
        node_id: str,
        settings: DockerSettings,
        last_seen: OutageLog | None = None,
        own_settings: Mapping[str, DockerSettings] | None = None,
        folder: Path = Path(),
    ) -> None:
        """Create the runtime; `own_settings` are those of agents with means of their own."""
        self._node_id = node_id
        self._settings = settings
        self._own_settings = own_settings or {}
        self._socket = settings.socket
        self._docker = DockerClient(settings.socket)
        self._images = Images(self._docker)
        self._facts: asyncio.Task[DockerFacts] | None = None
        """The request for the engine's capabilities, in flight or answered."""
        self._facts_requested_at = 0.0
        self._facts_failure = ""
        """The last failure, or how long none is known, until a request succeeds."""
        self._disk_failed_until = 0.0
        self._creating: set[str] = set()
        """Names of containers in creation; their creates inspect them after the start."""
        self._lookups: defaultdict[str, Lookups] = defaultdict(Lookups)
        """By agent: no agent waits for the mounts of another, or for its groups."""
        self._group_lookups: defaultdict[str, Lookups] = defaultdict(Lookups)
        self._device_lookups = Lookups()
        self._is_swept = False
        self._positions, self._folder = LogPositions(), folder
        self._last_seen = last_seen or OutageLog()
        self._observer = ContainerObserver(self._docker, node_id, self._last_seen)

    def update_settings(
        self, settings: DockerSettings, own_settings: Mapping[str, DockerSettings]
    ) -> None:
        """Replace the settings, except the engine's socket; existing kernels keep theirs."""
        self._settings = settings
        self._own_settings = own_settings

    def _settings_of(self, spec: KernelSpec) -> DockerSettings:
        """Return the settings of a request's agent."""
        return self._own_settings.get(spec.agent_id, self._settings)

    async def close(self) -> None:
        self._last_seen.save()
        if self._facts is not None:
            self._facts.cancel()
        await self._docker.close()

    async def support(self, spec: KernelSpec) -> Support:
        facts = await self._fetch_facts()
        not_enforced = facts.not_enforced
        publishes = network_of(spec, self._settings_of(spec)) not in UNPUBLISHED_NETWORKS
        if spec.ports and not publishes:
            not_enforced |= {"ports"}
        return Support(facts.features, not_enforced)

    async def _fetch_facts(self) -> DockerFacts:
        """Return the engine's capabilities, requested once for each connection to its events.

        Only the caller's patience is limited: a late answer serves the next caller.
        """
        try:
            async with asyncio.timeout(INSPECT_TIMEOUT_S):
                return await asyncio.shield(self._ask_facts())
        except TimeoutError:
            called_at = datetime.fromtimestamp(self._facts_requested_at, UTC)
            self._facts_failure = (
                f"the engine has not answered GET /info within {INSPECT_TIMEOUT_S:g} s"
                f" (called at {called_at:%Y-%m-%dT%H:%M:%SZ})"
            )
            raise RuntimeUnavailable(self._facts_failure) from None

    def _ask_facts(self) -> asyncio.Task[DockerFacts]:
        if self._facts is None:
            self._facts = asyncio.create_task(self._request_facts())
            self._facts.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._facts_requested_at = time.time()
        return self._facts

    async def _request_facts(self) -> DockerFacts:
        try:
            with errors_as_unavailable():
                version = await self._docker.fetch_version()
                info = await self._docker.call("GET", "/info", timeout_s=None)
                facts = parse_docker_facts(info, version)
        except RuntimeUnavailable as error:
            self._facts, self._facts_failure = None, f"GET /info: {error}"
            raise
        self._facts_failure = ""
        return facts

    @property
    def unready_reason(self) -> str:
        """The reason against creates; an engine whose last answer was a failure is asked again."""
        if time.monotonic() < self._disk_failed_until:
            return "the disk of the node's engine is full or not writable"
        is_ready = not self._facts_failure or self._ask_facts().done()
        return "" if is_ready else self._facts_failure

    async def validate_spec(self, spec: KernelSpec) -> Sequence[Problem]:
        problems = list(request_problems(spec, self._settings_of(spec)))
        try:
            await self._resolve_sources(spec)
        except InvalidRequest as error:
            problems += error.problems
        requested = container_options(spec).groups
        allowed, lookups = self._settings_of(spec).allowed_groups, self._group_lookups
        return [*problems, *await group_problems(requested, allowed, lookups[spec.agent_id])]

    async def _resolve_sources(self, spec: KernelSpec) -> list[MountSource]:
        """Resolve the mounts of a request.

        Raises:
            InvalidRequest: sources are missing or not below an allowed folder; lists all of them.
            RuntimeUnavailable: a file system fails or does not answer.
        """
        if not spec.mounts:
            return []
        allowed = self._settings_of(spec).allowed_mounts
        lookups = self._lookups[spec.agent_id]
        return await lookups.call(_SOURCES, lambda: resolve_sources(spec.mounts, allowed))

    async def create(self, plan: KernelPlan, progress: CreateProgress) -> ObservedKernel:
        command = program_of(plan.spec)
        if is_too_long(command):
            raise CommandNotFound(f"command {quote_untrusted(command)}: {TOO_LONG}")
        facts = await self._fetch_facts()
        facts.refuse_unsupported(plan.edits)
        if plan.edits.mounts or plan.edits.device_nodes:
            find_missing = partial(refuse_missing, plan.edits)
            await self._device_lookups.call("a file that the devices require", find_missing)
        settings, requested = self._settings_of(plan.spec), container_options(plan.spec).groups
        allowed = settings.allowed_groups
        plan = await with_group_ids(plan, requested, allowed, self._group_lookups)
        attempt = _Attempt(plan, facts, settings)
        self._creating.add(plan.name)
        try:
            await self._create_or_pull(attempt, progress)
            await hit_async("create.after_engine_create")
            await self._start(attempt)
            await hit_async("create.after_engine_start")
            inspection = await self._observer.inspect_container(attempt.container_id)
            await self._verify(inspection, attempt)
        except BaseException as error:
            if attempt.container_id:
                await self._undo(attempt, error)
            if attempt.may_exist:
                raise unknown_outcome_error(plan, error) from error
            if isinstance(error, asyncio.CancelledError):
                raise CreateUndone from error
            refusal = translate_error(error, plan, sources=attempt.sources)
            if isinstance(refusal, StateUnavailable):
                self._disk_failed_until = time.monotonic() + DISK_PAUSE_S
            raise refusal from error
        finally:
            self._creating.discard(plan.name)
        self._disk_failed_until = 0.0
        return self._observer.observe_inspection(inspection)

    async def _start(self, attempt: _Attempt) -> None:
        """Start a container.

        Raises:
            CommandNotFound, InvalidRequest: the request is the reason of the refusal.
            RuntimeUnavailable, RuntimeFailure: the engine, or the node, is.
        """
        path = f"/containers/{attempt.container_id}"
        try:
            await complete_shielded(self._docker.call("POST", f"{path}/start"))
        except DockerError as error:
            exit_code = 0
            with suppress(DockerError, DockerUnreachable, DockerResponseLost):
                inspection = await self._observer.inspect_container(attempt.container_id)
                exit_code = inspection["State"].get("ExitCode", 0)
            sources = attempt.sources
            raise translate_error(error, attempt.plan, exit_code, sources) from error

    async def _verify(self, inspection: Mapping[str, Any], attempt: _Attempt) -> None:
        host = attempt.config["HostConfig"]
        check = partial(verify_container, inspection, host, attempt.plan, attempt.sources)
        if attempt.sources:
            await self._lookups[attempt.plan.spec.agent_id].call(_SOURCES, check)
        else:
            check()

    async def _create_or_pull(self, attempt: _Attempt, progress: CreateProgress) -> None:
        """Create a container and pull its image if needed."""
        options, image = attempt.options, attempt.plan.spec.image or ""
        if options.pull_policy is not PullPolicy.ALWAYS:
            try:
                await self._create_container(attempt, progress)
            except ImageNotFound as error:
                if options.pull_policy is PullPolicy.NEVER:
                    raise ImageNotFound(f"{error} (pull_policy: never)") from error
            else:
                return
        progress(KernelState.PULLING)
        await self._images.pull(
            image,
            options.platform,
            attempt.settings.registry_auth,
            lambda pull: progress(KernelState.PULLING, pull),
        )
        await hit_async("create.after_pull")
        try:
            await self._create_container(attempt, progress)
        except ImageNotFound as error:
            if options.platform is None:
                raise
            reason = f"not available for the requested platform {options.platform}"
            raise ImageNotFound(f"image {image}: {reason} ({error})") from error

    async def _create_container(self, attempt: _Attempt, progress: CreateProgress) -> None:
        """Create a container, and report `creating` before."""
        attempt.set_sources(await self._resolve_sources(attempt.plan.spec))
        await hit_async("create.before_engine_create")
        progress(KernelState.CREATING)
        await complete_shielded(self._request_container(attempt))

    async def _request_container(self, attempt: _Attempt) -> None:
        params = {"name": attempt.plan.name}
        if attempt.options.platform is not None:
            params["platform"] = attempt.options.platform
        attempt.may_exist = True
        try:
            response = await self._docker.call("POST", "/containers/create", params, attempt.config)
        except DockerUnreachable:
            attempt.may_exist = False
            raise
        except DockerError as error:
            attempt.may_exist = False
            if error.status == NOT_FOUND and not _NO_NETWORK.search(error.detail):
                raise ImageNotFound(f"image {attempt.config['Image']}: {error.message}") from error
            raise
        attempt.container_id = parse_container_id(response.get("Id"))
        if reason := foreign_image_reason(response.get("Warnings") or ()):
            foreign = ImageNotFound(f"image {attempt.config['Image']}: {reason}")
            await self._undo(attempt, foreign)
            attempt.container_id = ""
            raise foreign

    async def _undo(self, attempt: _Attempt, error: BaseException) -> None:
        """Remove the container of a failed create, by id and never by name.

        Raises:
            OutcomeUnknown: the engine does not confirm the removal.
        """
        try:
            await hit_async("create.before_undo")
            with suppress_not_found():
                await complete_shielded(self._delete(attempt.container_id, force=True))
            attempt.may_exist = False
            await hit_async("create.after_undo")
        except BaseException as cleanup_error:
            raise unknown_outcome_error(attempt.plan, error) from cleanup_error

    async def _delete(
        self, container: str, *, force: bool, timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        path, params = f"/containers/{container}", {"v": "1", "force": str(int(force))}
        try:
            await self._docker.call("DELETE", path, params, timeout_s=timeout_s)
        except DockerError as error:
            if error.status != CONFLICT or not force:
                raise
            # another client is removing it
            await self._docker.call("POST", f"{path}/wait", {"condition": "removed"})

    def _container_reference(self, ref: KernelRef) -> str:
        """Return the id of a kernel's container, or its name."""
        return ref.handle or kernel_name(self._node_id, ref.kernel_id)

    async def stop(self, ref: KernelRef, timeout_s: float | None) -> None:
        grace_s = self._settings.stop_timeout if timeout_s is None else timeout_s
        path, params = (
            f"/containers/{self._container_reference(ref)}/stop",
            {"t": str(math.ceil(grace_s))},
        )
        with translate_errors(), suppress_not_found():
            timeout_s = CALL_TIMEOUT_S + grace_s
            await self._docker.call("POST", path, params, timeout_s=timeout_s)

    async def signal(self, ref: KernelRef, number: int) -> bool:
        path = f"/containers/{self._container_reference(ref)}/kill"
        with translate_errors():
            try:
                await self._docker.call("POST", path, {"signal": str(number)})
            except DockerError:  # engines answer 404, 409, or 500 if its process has just ended
                found = await self.find(ref)
                if found is not None and found.is_alive:
                    raise
                return False
        return True

    async def remove(self, ref: KernelRef, *, unless_alive: bool = False) -> bool:
        container = self._container_reference(ref)
        with translate_errors(), suppress_not_found():
            try:
                timeout_s = LIST_TIMEOUT_S if unless_alive else CALL_TIMEOUT_S
                await self._delete(container, force=not unless_alive, timeout_s=timeout_s)
            except DockerError as error:
                if error.status != CONFLICT or not unless_alive:
                    raise
                return False
        with suppress(OSError):
            self._positions_file(ref.kernel_id).unlink()
        return True

    async def list_kernels(self) -> Listing:
        listing = await self._observer.list_kernels()
        self._last_seen.update()
        if not self._is_swept:
            kept = {self._positions_file(kernel.kernel_id) for kernel in listing.kernels}
            for file in set(self._folder.glob(f"*{_POSITIONS}")) - kept:
                with suppress(OSError):
                    file.unlink()
            containers = [kernel.ref.handle for kernel in listing.kernels if kernel.ref.handle]
            sweep = partial(kill_orphaned_execs, self._node_id, containers)
            with suppress(RuntimeUnavailable):  # the environment of a stuck process
                await self._device_lookups.call("an environment in /proc", sweep)
            self._is_swept = True
        return listing

    async def find(self, ref: KernelRef) -> ObservedKernel | None:
        return await self._observer.find(ref)

    async def watch_events(self) -> AsyncIterator[str]:
        if self._facts is not None and self._facts.done():
            self._facts = None  # a restarted engine may differ
        self._docker.forget_version()
        try:
            async with aclosing(
                watch_container_events(self._docker, self._node_id)
            ) as container_events:
                async for event in container_events:
                    if event is CONNECTED:
                        await self._on_connected()
                        yield ""
                        continue
                    self._last_seen.update()
                    if not event.kernel_id:
                        if event.action in ("create", DESTROY):
                            yield ""
                    elif event.action not in CREATE_ACTIONS or event.name not in self._creating:
                        self._observer.record_event(event)
                        yield event.kernel_id
            self._last_seen.mark_lost()
        except RuntimeUnavailable:
            self._last_seen.mark_lost()
            raise

    async def _on_connected(self) -> None:
        self._observer.forget_events()
        keeps_containers = True
        with suppress(RuntimeUnavailable):
            keeps_containers = (await self._fetch_facts()).restores_live
        self._last_seen.mark_connected(keeps_containers=keeps_containers)

    async def start_exec(self, kernel: Kernel, spec: ExecSpec) -> Session:
        container = self._container_reference(kernel.ref)
        with translate_errors():
            return await start_docker_exec(
                self._docker, self._socket, self._node_id, container, spec
            )

    async def usages(self, kernels: Sequence[Kernel]) -> Mapping[str, UsageReading]:
        return await asyncio.to_thread(lambda: read_usages(self._observer.find_counters(kernels)))

    def logs(self, ref: KernelRef, query: LogQuery) -> AbstractAsyncContextManager[KernelLog]:
        container = self._container_reference(ref)
        source = ContainerLog(self._docker, container)
        file = self._positions_file(ref.kernel_id)
        return self._positions.open(source, query, file, container)

    def _positions_file(self, kernel_id: str) -> Path:
        return self._folder / f"{kernel_id}{_POSITIONS}"

"""Kernels as containers of a Docker Engine.

The labels on a container are the truth about it. A container is ours if its name is the one
that its labels call for, or if it does not have them from its image: an image made from a
kernel inherits the labels, and a container of it is nobody's kernel. Only a "not found" from
the engine proves that a container is gone; everything else that goes wrong is a state of
the engine.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from agentd.core.container_options import PullPolicy
from agentd.core.kernel import KernelRef, KernelSpec, KernelState
from agentd.core.observation import Listing, ObservedKernel
from agentd.core.plan import KernelPlan, kernel_name
from agentd.errors import ImageNotFound, InvalidRequest, Problem
from agentd.failpoints import reach
from agentd.runtimes.docker.config import (
    KERNEL_LABEL,
    NODE_LABEL,
    RECORD_LABEL,
    UNPUBLISHED,
    DockerRules,
    container_config,
)
from agentd.runtimes.docker.engine import (
    AnswerLost,
    EngineClient,
    EngineError,
    EngineUnreachable,
)
from agentd.runtimes.docker.facts import EngineFacts, engine_facts
from agentd.runtimes.docker.images import Images
from agentd.runtimes.docker.inspection import inspected, labels_of, observed_kernel, verify
from agentd.runtimes.docker.mounts import Source, refuse_missing, resolved
from agentd.runtimes.docker.streams import CONNECTED, OwnEvents, events, printed
from agentd.runtimes.docker.translation import (
    CONFLICT,
    NOT_FOUND,
    absent_is_fine,
    is_no_image,
    proving,
    translated,
    translating,
    unknown,
)
from agentd.services.interfaces import LogQuery, Progress, Support

INSPECTS_AT_ONCE = 16
ASK_TIMEOUT_S = 5.0
LIST_TIMEOUT_S = 20.0
"""How long it may take to list everything, or to remove what never ran."""
"""How long an engine may take to say what one container, or the engine itself, is."""
_T = TypeVar("_T")


class _Attempt:
    """One create on its way: its mounts are looked up right before each time it is asked for."""

    def __init__(self, plan: KernelPlan, engine: EngineFacts, rules: DockerRules) -> None:
        self.plan = plan
        self.platform = plan.spec.container.platform or engine.platform
        self.sources: list[Source] = []
        self.config: dict[str, Any] = {}
        self._engine = engine
        self._rules = rules

    def look(self) -> None:
        """Make the engine's request from how things are now.

        Raises:
            InvalidRequest: a mount leads elsewhere than it may.
        """
        self.sources = resolved(self.plan.spec.mounts, self._rules.allowed_mounts)
        self.config = container_config(self.plan, self._rules, self.sources, self._engine)


MINIMUM_BYTES = 6 * 2**20
"""The engine refuses less (Engine 20.10, "Minimum memory limit allowed is 6MB")."""


class DockerRuntime:
    """Runs containers; see `agentd.services.interfaces.Runtime`."""

    name = "docker"
    minimum_memory_bytes = MINIMUM_BYTES

    def __init__(self, socket: Path, node_id: str, rules: DockerRules) -> None:
        self._node_id = node_id
        self._rules = rules
        self._engine = EngineClient(socket)
        self._images = Images(self._engine, rules.registry_auth)
        self._facts: EngineFacts | None = None
        self._own = OwnEvents()

    def renew(self, rules: DockerRules) -> None:
        self._rules = rules

    async def close(self) -> None:
        await self._engine.close()

    async def support(self, spec: KernelSpec) -> Support:
        facts = await self._known_facts()
        missing = facts.not_enforced
        publishes = self._rules.network_of(spec) not in UNPUBLISHED
        if spec.ports and not publishes:
            missing |= {"ports"}
        return Support(facts.features, missing)

    async def _known_facts(self) -> EngineFacts:
        """Return what this engine can do; asked once for each connection to its events."""
        if self._facts is None:
            with proving():
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    version = await self._engine.version()
                    info = await self._engine.call("GET", "/info")
            self._facts = engine_facts(info, version)
        return self._facts

    def problems(self, spec: KernelSpec) -> Sequence[Problem]:
        problems = list(self._rules.problems(spec))
        try:
            resolved(spec.mounts, self._rules.allowed_mounts)
        except InvalidRequest as error:
            problems += error.problems
        return problems

    async def create(self, plan: KernelPlan, progress: Progress) -> ObservedKernel:
        facts = await self._known_facts()
        facts.refuse_what_it_cannot(plan.edits)
        refuse_missing(plan.edits)
        attempt = _Attempt(plan, facts, self._rules)
        self._own.expect(plan.name)
        try:
            container = await self._create(attempt, progress)
        except BaseException as error:
            self._own.forget(plan.name)
            if isinstance(error, AnswerLost):
                raise unknown(plan, error) from error
            raise translated(error, plan) from error
        try:
            await reach("create.after_engine_create")
            await _to_the_end(self._engine.call("POST", f"/containers/{container}/start"))
            await reach("create.after_engine_start")
            shown = await self._inspection(container)
            verify(shown, attempt.config["HostConfig"], plan, attempt.sources)
        except BaseException as error:
            self._own.forget(plan.name)
            await self._undo(container, plan, error)
            raise translated(error, plan) from error
        return observed_kernel(shown)

    async def _create(self, attempt: _Attempt, progress: Progress) -> str:
        """Return the id of a container that was created, its image fetched if need be."""
        options, image = attempt.plan.spec.container, attempt.plan.spec.image or ""
        if options.pull_policy is not PullPolicy.ALWAYS:
            progress(KernelState.CREATING)
            try:
                return await self._made(attempt)
            except ImageNotFound as error:
                if options.pull_policy is PullPolicy.NEVER:
                    raise ImageNotFound(f"{error}, and pull_policy is never") from error
        progress(KernelState.PULLING)
        await self._images.pull(
            image, attempt.platform, lambda pull: progress(KernelState.PULLING, pull)
        )
        await reach("create.after_pull")
        progress(KernelState.CREATING)
        return await self._made(attempt)

    async def _made(self, attempt: _Attempt) -> str:
        attempt.look()
        await reach("create.before_engine_create")
        making = asyncio.ensure_future(self._asked_for(attempt))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError as error:
            await asyncio.wait([making])
            if making.exception() is None:
                await self._undo(making.result(), attempt.plan, error)
            elif isinstance(making.exception(), AnswerLost):
                raise unknown(attempt.plan, error) from error
            raise

    async def _asked_for(self, attempt: _Attempt) -> str:
        params = {"name": attempt.plan.name, "platform": attempt.platform}
        try:
            made = await self._engine.call("POST", "/containers/create", params, attempt.config)
        except EngineError as error:
            if is_no_image(error):
                raise ImageNotFound(f"image {attempt.config['Image']}: {error.message}") from error
            raise
        if not isinstance(made, dict) or not isinstance(made.get("Id"), str):
            raise AnswerLost("the engine's answer to a create has no container id")
        container: str = made["Id"]
        return container

    async def _undo(self, container: str, plan: KernelPlan, error: BaseException) -> None:
        """Remove a container that was created and is not wanted; by id, never by name.

        Raises:
            OutcomeUnknown: the engine does not confirm that it is gone.
        """
        try:
            await reach("create.before_undo")
            with absent_is_fine():
                await _to_the_end(self._delete(container, force=True))
            await reach("create.after_undo")
        except (EngineError, EngineUnreachable, AnswerLost, OSError):
            raise unknown(plan, error) from error

    async def _delete(self, container: str, *, force: bool) -> None:
        path, given = f"/containers/{container}", {"v": "1", "force": str(int(force))}
        await self._engine.call("DELETE", path, given)

    def _container(self, ref: KernelRef) -> str:
        """Return how the engine is asked for a kernel's container: by id, else by name."""
        return quote(ref.handle or kernel_name(self._node_id, ref.kernel_id), safe="")

    async def stop(self, ref: KernelRef, timeout_s: float | None) -> None:
        grace_s = self._rules.stop_timeout_s if timeout_s is None else timeout_s
        path, given = f"/containers/{self._container(ref)}/stop", {"t": str(math.ceil(grace_s))}
        with translating(), absent_is_fine():
            await self._engine.call("POST", path, given)

    async def remove(self, ref: KernelRef, *, unless_alive: bool = False) -> bool:
        container = self._container(ref)
        with translating(), absent_is_fine():
            try:
                async with asyncio.timeout(LIST_TIMEOUT_S if unless_alive else None):
                    await self._delete(container, force=not unless_alive)
            except EngineError as error:
                if error.status != CONFLICT:
                    raise
                if unless_alive:
                    return False
                path = f"/containers/{container}/wait"  # somebody else is removing it
                await self._engine.call("POST", path, {"condition": "removed"})
        return True

    async def list(self) -> Listing:
        filters = json.dumps({"label": [f"{NODE_LABEL}={self._node_id}"]})
        places = asyncio.Semaphore(INSPECTS_AT_ONCE)

        async def shown(summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
            async with places:
                return await self._shown(summary)

        with proving():
            return await asyncio.wait_for(self._listed(shown, filters), LIST_TIMEOUT_S)

    async def _listed(
        self,
        shown: Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any] | None]],
        filters: str,
    ) -> Listing:
        params = {"all": "1", "filters": filters}
        summaries = await self._engine.call("GET", "/containers/json", params)
        answers = await asyncio.gather(*(shown(summary) for summary in summaries))
        there = [answer for answer in answers if answer is not None]
        ours = {labels_of(a)[KERNEL_LABEL]: a for a in there if self._fits(a)}
        for answer in there:
            kernel_id = labels_of(answer).get(KERNEL_LABEL)
            if kernel_id and kernel_id not in ours and await self._was_renamed(answer):
                ours[kernel_id] = answer
        return Listing(tuple(observed_kernel(answer) for answer in ours.values()))

    async def _shown(self, summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Inspect one container of a list; what the list said of it if that fails alone."""
        try:
            return await self._inspection(summary["Id"])
        except (TimeoutError, AnswerLost):
            pass
        except EngineError as error:
            if error.status == NOT_FOUND:
                return None
        return {
            "Id": summary["Id"],
            "Name": (summary.get("Names") or [""])[0],
            "State": {"Status": summary.get("State", "running")},
            "Config": {"Labels": summary.get("Labels", {})},
        }

    async def find(self, ref: KernelRef) -> ObservedKernel | None:
        if ref.handle and (shown := await self._found(ref.handle)):
            labels = labels_of(shown)
            if (labels.get(NODE_LABEL), labels.get(KERNEL_LABEL)) == (self._node_id, ref.kernel_id):
                return observed_kernel(shown)
        shown = await self._found(kernel_name(self._node_id, ref.kernel_id))
        return observed_kernel(shown) if shown and self._fits(shown) else None

    async def _was_renamed(self, shown: Mapping[str, Any]) -> bool:
        """Tell a kernel that somebody renamed from a container that inherits its image's labels."""
        with absent_is_fine():
            image = await self._engine.call("GET", f"/images/{shown['Image']}/json")
            inherited = (image.get("Config") or {}).get("Labels") or {}
            return inherited.get(RECORD_LABEL) != labels_of(shown).get(RECORD_LABEL)
        return True

    async def _found(self, container: str) -> Mapping[str, Any] | None:
        with proving(), absent_is_fine():
            return await self._inspection(quote(container, safe=""))
        return None

    async def _inspection(self, container: str) -> Mapping[str, Any]:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return inspected(await self._engine.call("GET", f"/containers/{container}/json"))

    async def follow(self) -> AsyncIterator[str]:
        self._facts = None  # an engine that was restarted may be another one
        self._engine.forget_version()
        try:
            async with aclosing(events(self._engine, self._node_id)) as happened:
                async for event in happened:
                    if event is CONNECTED:
                        self._own.listen()
                    if not self._own.is_own(event):
                        yield event.kernel_id
        finally:
            self._own.stop_listening()

    async def logs(self, ref: KernelRef, query: LogQuery) -> AsyncGenerator[bytes]:
        async with aclosing(printed(self._engine, self._container(ref), query)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _fits(self, shown: Mapping[str, Any]) -> bool:
        """Tell whether a container's name is the one that its labels call for."""
        labels = labels_of(shown)
        expected = kernel_name(self._node_id, labels.get(KERNEL_LABEL, ""))
        return labels.get(NODE_LABEL) == self._node_id and shown["Name"] == f"/{expected}"


async def _to_the_end(step: Awaitable[_T]) -> _T:
    """Let a step of the engine end before a cancellation takes effect."""
    task = asyncio.ensure_future(step)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise

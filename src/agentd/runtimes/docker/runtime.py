"""Kernels as containers of a Docker Engine, through aiodocker.

The labels on a container are the truth about it. A container is ours if its name is the one
that its labels call for, or if it does not have them from its image: an image made from a
kernel inherits the labels, and a container of it is nobody's kernel. Only a "not found" from
the engine proves that a container is gone; everything else that goes wrong is a state of
the engine.

API: https://docs.docker.com/reference/api/engine/version/v1.41/
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from aiodocker import Docker, DockerError
from aiodocker.containers import DockerContainer

from agentd.core.container_options import PullPolicy
from agentd.core.kernel import KernelSpec, KernelState
from agentd.core.plan import KernelPlan, kernel_name
from agentd.core.reconcile import FoundKernel
from agentd.errors import ImageNotFound, InvalidRequest
from agentd.failpoints import reach
from agentd.plugin_api import Features
from agentd.runtimes.docker.answers import (
    CONFLICT,
    CONNECTION_FAILED,
    NOT_FOUND,
    NoAnswer,
    absent_is_fine,
    answered,
    is_lost_answer,
    is_no_image,
    listing,
    translated,
    translating,
    unknown,
)
from agentd.runtimes.docker.config import (
    KERNEL_LABEL,
    NODE_LABEL,
    RECORD_LABEL,
    UNPUBLISHED,
    DockerRules,
    container_config,
)
from agentd.runtimes.docker.facts import EngineFacts, engine_facts
from agentd.runtimes.docker.images import Images
from agentd.runtimes.docker.inspection import found_kernel, inspected, labels_of, verify
from agentd.runtimes.docker.mounts import Source, refuse_missing, resolved
from agentd.runtimes.docker.streams import CONNECTED, OwnEvents, events, printed
from agentd.services.interfaces import LogQuery, Progress

INSPECTS_AT_ONCE = 16
ASK_TIMEOUT_S = 5.0
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


class DockerRuntime:
    """Runs containers; see `agentd.services.interfaces.Runtime`."""

    name = "docker"
    minimum_memory_bytes = 6 * 2**20
    """The engine refuses less (Engine 20.10, "Minimum memory limit allowed is 6MB")."""

    def __init__(self, socket: Path, node_id: str, rules: DockerRules) -> None:
        self._node_id = node_id
        self._rules = rules
        self._connector = aiohttp.UnixConnector(str(socket), limit=0)
        self._docker = Docker("unix://localhost", connector=self._connector)
        self._images = Images(self._docker, rules.registry_auth)
        self._facts: EngineFacts | None = None
        self._own = OwnEvents()

    async def close(self) -> None:
        await self._docker.close()
        await self._connector.close()

    async def features(self) -> Features:
        return (await self._engine()).features

    async def _engine(self) -> EngineFacts:
        """Return what this engine can do; asked once for each connection to its events."""
        if self._facts is None:
            with listing():
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    info = await self._docker.system.info()
                    version = await self._docker.version()
            self._facts = engine_facts(info, version)
        return self._facts

    def unenforced(self, spec: KernelSpec) -> frozenset[str]:
        missing = self._facts.unenforced if self._facts else frozenset[str]()
        publishes = self._rules.network_of(spec) not in UNPUBLISHED
        return missing if publishes or not spec.ports else missing | {"ports"}

    async def check(self, spec: KernelSpec) -> None:
        problems = list(self._rules.problems(spec))
        try:
            resolved(spec.mounts, self._rules.allowed_mounts)
        except InvalidRequest as error:
            problems += error.problems
        if problems:
            raise InvalidRequest(problems)

    async def create(self, plan: KernelPlan, progress: Progress) -> FoundKernel:
        engine = await self._engine()
        engine.refuse_what_it_cannot(plan.edits)
        refuse_missing(plan.edits)
        attempt = _Attempt(plan, engine, self._rules)
        self._own.expect(plan.name)
        try:
            container = await self._create(attempt, progress)
        except BaseException as error:
            self._own.forget(plan.name)
            if is_lost_answer(error):
                raise unknown(plan, error) from error
            raise translated(error, plan) from error
        try:
            await reach("create.after_engine_create")
            await _to_the_end(container.start())
            await reach("create.after_engine_start")
            shown = inspected(await answered(container.show()))
            verify(shown, attempt.config["HostConfig"], plan, attempt.sources)
        except BaseException as error:
            self._own.forget(plan.name)
            await self._undo(container, plan, error)
            raise translated(error, plan) from error
        return found_kernel(shown)

    async def _create(self, attempt: _Attempt, progress: Progress) -> DockerContainer:
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

    async def _made(self, attempt: _Attempt) -> DockerContainer:
        attempt.look()
        await reach("create.before_engine_create")
        plan = attempt.plan
        asking = self._asked(plan.name, attempt.config, attempt.platform)
        making = asyncio.ensure_future(asking)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError as error:
            await asyncio.wait([making])
            if making.exception() is None:
                await self._undo(making.result(), plan, error)
            elif is_lost_answer(making.exception()):
                raise unknown(plan, error) from error
            raise

    async def _asked(self, name: str, config: dict[str, Any], platform: str) -> DockerContainer:
        asking = self._docker._query_json(  # noqa: SLF001 - its create takes no platform
            "containers/create",
            method="POST",
            data=json.dumps(config).encode(),
            params={"name": name, "platform": platform},
        )
        try:
            made = await answered(asking)
        except DockerError as error:
            if is_no_image(error):
                raise ImageNotFound(f"image {config['Image']}: {error.message}") from error
            raise
        if not isinstance(made, dict) or not isinstance(made.get("Id"), str):
            raise NoAnswer("the engine's answer to a create is none")
        return self._docker.containers.container(made["Id"])

    async def _undo(
        self, container: DockerContainer, plan: KernelPlan, error: BaseException
    ) -> None:
        """Remove a container that was created and is not wanted; by id, never by name.

        Raises:
            OutcomeUnknown: the engine does not confirm that it is gone.
        """
        try:
            await reach("create.before_undo")
            await _to_the_end(container.delete(force=True, v=True))
            await reach("create.after_undo")
        except (DockerError, aiohttp.ClientError, OSError) as failed:
            if not (isinstance(failed, DockerError) and failed.status == NOT_FOUND):
                raise unknown(plan, error) from error

    async def stop(self, kernel_id: str, handle: str, timeout_s: float | None) -> None:
        grace_s = self._rules.stop_timeout_s if timeout_s is None else timeout_s
        with translating(), absent_is_fine():
            await self._docker.containers.container(handle).stop(t=math.ceil(grace_s))

    async def remove(self, kernel_id: str, handle: str) -> None:
        container = self._docker.containers.container(handle)
        with translating(), absent_is_fine():
            try:
                await container.delete(force=True, v=True)
            except DockerError as error:
                if error.status != CONFLICT:
                    raise
                await container.wait(condition="removed")  # somebody else is removing it

    async def discard(self, kernel_id: str, handle: str) -> bool:
        with translating(), absent_is_fine():
            try:
                await self._docker.containers.container(handle).delete(v=True)
            except DockerError as error:
                if error.status == CONFLICT:
                    return False
                raise
        return True

    async def list(self) -> Sequence[FoundKernel]:
        filters = json.dumps({"label": [f"{NODE_LABEL}={self._node_id}"]})
        places = asyncio.Semaphore(INSPECTS_AT_ONCE)

        async def shown(summary: DockerContainer) -> Mapping[str, Any] | None:
            async with places:
                return await self._shown(summary)

        with listing():
            summaries = await self._docker.containers.list(all=True, filters=filters)
            answers = await asyncio.gather(*(shown(summary) for summary in summaries))
            there = [answer for answer in answers if answer is not None]
            ours = {labels_of(a)[KERNEL_LABEL]: a for a in there if self._fits(a)}
            for answer in there:
                kernel_id = labels_of(answer).get(KERNEL_LABEL)
                if kernel_id and kernel_id not in ours and await self._was_renamed(answer):
                    ours[kernel_id] = answer
        return [found_kernel(answer) for answer in ours.values()]

    async def strays(self, known: Collection[str]) -> Sequence[str]:
        return ()  # a container is all there is of a kernel, and its volumes go with it

    async def _shown(self, summary: DockerContainer) -> Mapping[str, Any] | None:
        """Inspect one container of a list; what the list said of it if that fails alone."""
        try:
            return await self._asked_what_is(summary.id)
        except (TimeoutError, NoAnswer):
            pass
        except DockerError as error:
            if error.status == NOT_FOUND:
                return None
            if error.status == CONNECTION_FAILED:
                raise
        listed = summary._container  # noqa: SLF001 - aiodocker has no other way to the list's entry
        return {
            "Id": summary.id,
            "Name": (listed.get("Names") or [""])[0],
            "State": {"Status": listed.get("State", "running")},
            "Config": {"Labels": listed.get("Labels", {})},
        }

    async def find(self, kernel_id: str, handle: str | None = None) -> FoundKernel | None:
        if handle and (shown := await self._inspected(handle)):
            labels = labels_of(shown)
            if (labels.get(NODE_LABEL), labels.get(KERNEL_LABEL)) == (self._node_id, kernel_id):
                return found_kernel(shown)
        shown = await self._inspected(kernel_name(self._node_id, kernel_id))
        return found_kernel(shown) if shown and self._fits(shown) else None

    async def _was_renamed(self, shown: Mapping[str, Any]) -> bool:
        """Tell a kernel that somebody renamed from a container that inherits its image's labels."""
        with absent_is_fine():
            image = await self._docker.images.inspect(shown["Image"])
            inherited = (image.get("Config") or {}).get("Labels") or {}
            return inherited.get(RECORD_LABEL) != labels_of(shown).get(RECORD_LABEL)
        return True

    async def _inspected(self, container: str) -> Mapping[str, Any] | None:
        with listing(), absent_is_fine():
            return await self._asked_what_is(container)
        return None

    async def _asked_what_is(self, container: str) -> Mapping[str, Any]:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return inspected(await answered(self._docker.containers.container(container).show()))

    async def follow(self) -> AsyncIterator[str]:
        self._facts = None  # an engine that was restarted may be another one
        try:
            async for event in events(self._docker, self._node_id):
                if event is CONNECTED:
                    self._own.listen()
                if not self._own.is_own(event):
                    yield event.kernel_id
        finally:
            self._own.stop_listening()

    async def logs(self, kernel_id: str, handle: str, query: LogQuery) -> AsyncIterator[bytes]:
        async for chunk in printed(self._docker, handle, query):
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

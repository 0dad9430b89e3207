"""A registry of images on loopback, as much of the distribution protocol as an engine pulls by.

https://github.com/opencontainers/distribution-spec/blob/main/spec.md
"""

import asyncio
import base64
import gzip
import json
import os
from collections.abc import Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from aiohttp import web

_CONFIG = "application/vnd.docker.container.image.v1+json"
_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_CHUNK = 64 * 1024


class Registry:
    """Serves images made of one layer; `gate` holds back the second half of each layer."""

    def __init__(self, login: tuple[str, str] | None = None) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.layers_begun = 0
        self._login = login
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/v2/", self._root)
        app.router.add_get("/v2/{name}/manifests/{reference}", self._manifest)
        app.router.add_get("/v2/{name}/blobs/{digest}", self._blob)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        self.gate.set()
        if self._runner is not None:
            await self._runner.cleanup()

    def image(
        self,
        name: str,
        tar: bytes,
        *,
        architecture: str | None = "",
        padding: int = 0,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Offer an image, and return its full name; `padding` random bytes make it larger.

        Without an architecture (None), its configuration names no platform at all.
        """
        if padding:
            tar = _with_file(tar, os.urandom(padding))
        layer = gzip.compress(tar, 1)
        config: dict[str, Any] = {
            "architecture": architecture or {"aarch64": "arm64"}.get(os.uname().machine, "amd64"),
            "os": "linux",
            "config": {"Env": ["PATH=/bin"], **settings},
            "rootfs": {"type": "layers", "diff_ids": [_digest(tar)]},
        }
        if architecture is None:
            del config["architecture"], config["os"]
        content = json.dumps(config).encode()
        self.blobs |= {_digest(content): content, _digest(layer): layer}
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": {"mediaType": _CONFIG, "size": len(content), "digest": _digest(content)},
            "layers": [{"mediaType": _LAYER, "size": len(layer), "digest": _digest(layer)}],
        }
        body = json.dumps(manifest).encode()
        self.manifests |= {f"{name}:1": body, f"{name}:{_digest(body)}": body}
        return f"127.0.0.1:{self.port}/{name}:1"

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self._login is not None:
            wanted = base64.b64encode(":".join(self._login).encode()).decode()
            if request.headers.get("Authorization") != f"Basic {wanted}":
                challenge = {"WWW-Authenticate": 'Basic realm="registry"'}
                return web.json_response({"errors": []}, status=401, headers=challenge)
        return await handler(request)

    async def _root(self, _: web.Request) -> web.Response:
        return web.json_response({}, headers={"Docker-Distribution-Api-Version": "registry/2.0"})

    async def _manifest(self, request: web.Request) -> web.Response:
        key = f"{request.match_info['name']}:{request.match_info['reference']}"
        if key not in self.manifests:
            error = {"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}
            return web.json_response({"errors": [error]}, status=404)
        body = self.manifests[key]
        headers = {"Docker-Content-Digest": _digest(body)}
        return web.Response(body=body, content_type=_MANIFEST, headers=headers)

    async def _blob(self, request: web.Request) -> web.StreamResponse:
        blob = self.blobs[request.match_info["digest"]]
        if len(blob) < 2 * _CHUNK:
            return web.Response(body=blob)
        self.layers_begun += 1
        response = web.StreamResponse(headers={"Content-Length": str(len(blob))})
        await response.prepare(request)
        half = len(blob) // 2
        for start in range(0, len(blob), _CHUNK):
            if start >= half:
                await self.gate.wait()
            await response.write(blob[start : min(start + _CHUNK, len(blob))])
        await response.write_eof()
        return response


def _digest(content: bytes) -> str:
    return f"sha256:{sha256(content).hexdigest()}"


def _with_file(tar: bytes, content: bytes) -> bytes:
    import tarfile
    from io import BytesIO

    buffer = BytesIO(tar)
    with tarfile.open(fileobj=buffer, mode="a") as archive:
        entry = tarfile.TarInfo("padding")
        entry.size = len(content)
        archive.addfile(entry, BytesIO(content))
    return buffer.getvalue()

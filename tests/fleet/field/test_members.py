"""Members of etcd that are in a strange state, beside others that are well."""

import asyncio
from base64 import b64encode

import pytest

from agentd_fleet.store.etcd_client import EtcdClient
from agentd_fleet.store.etcd_transport import EtcdCredentials, EtcdUnavailable
from end_to_end.fleet.etcd_server import EtcdServers


async def test_a_member_that_was_silent_is_asked_last(servers: EtcdServers) -> None:
    """A watch that finds its member silent costs the next call no time."""
    accepted: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    credentials = EtcdCredentials((endpoint, *servers.endpoints))
    async with EtcdClient(credentials, timeout_s=0.5) as etcd:
        key = {"key": b64encode(b"x").decode()}
        with pytest.raises(EtcdUnavailable, match="no answer"):
            await etcd._transport.call_at(endpoint, "/v3/kv/range", key)
        assert (await etcd.range("/agentd/"))[0] == []
    assert len(accepted) == 1
    silent.close()
    for writer in accepted:
        writer.close()

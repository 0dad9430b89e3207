"""A real nginx, with the configurations of the page about proxies."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from end_to_end.prometheus import free_port
from support.waiting import until

PAGES = Path(__file__).parents[2] / "docs/how-to"
CONFIG = """
daemon off;
master_process off;
pid {prefix}/pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {prefix}/body;
    proxy_temp_path {prefix}/proxy;
    fastcgi_temp_path {prefix}/fastcgi;
    uwsgi_temp_path {prefix}/uwsgi;
    scgi_temp_path {prefix}/scgi;
    {content}
}}
"""
NOBODY = 65534


def block(name: str, page: str = "behind-a-reverse-proxy.md") -> str:
    """Return a block of configuration from a page."""
    return (PAGES / page).read_text().split(f"```nginx {name}\n")[1].split("```")[0]


class Nginx:
    """One process of nginx on loopback, as another user if root runs the test."""

    def __init__(self, content: str, replaced: Mapping[str, object]) -> None:
        self.port = free_port()
        self.url = f"https://localhost:{self.port}"
        self.prefix = Path(tempfile.mkdtemp(prefix="agentd-nginx-", dir="/tmp"))
        for text, replacement in {"443": f"127.0.0.1:{self.port}", **replaced}.items():
            assert text in content, f"{text} is not in the page"
            content = content.replace(text, str(replacement))
        self.config = self.prefix / "nginx.conf"
        self.config.write_text(CONFIG.format(prefix=self.prefix, content=content))

    async def start(self) -> None:
        error_log = self.prefix / "error.log"
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        if user:
            os.chown(self.prefix, NOBODY, NOBODY)
        command = ["nginx", "-p", self.prefix, "-e", error_log, "-c", self.config]
        self.process = subprocess.Popen([*map(str, command)], stderr=subprocess.DEVNULL, **user)

        async def is_up() -> bool:
            assert self.process.poll() is None, error_log.read_text()
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                return False
            writer.close()
            return True

        await until(is_up, True, text="nginx accepts connections")

    async def stop(self) -> None:
        self.process.terminate()
        await asyncio.to_thread(self.process.wait, 20)
        shutil.rmtree(self.prefix)

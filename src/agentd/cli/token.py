"""`agentctl token`: tokens for those who call over TCP. Nothing here asks a daemon."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import click
import tomlkit

from agentd.core.names import is_name, shortened

FOLDER = Path("/etc/agentd/tokens")
_BYTES = 32


@click.group()
def token() -> None:
    """Make tokens for callers over TCP."""


@token.command("create")
@click.argument("name")
@click.option("--role", type=click.Choice(["admin", "agent", "read"]), help="Default: agent.")
@click.option("--agent", "agents", multiple=True, help="Whose agents; may be repeated.")
@click.option("--file", type=click.Path(path_type=Path), help=f"Default: {FOLDER}/NAME.")
@click.option("--gateway", is_flag=True, help="For a fleet's gateway: acts for its callers.")
def create_token(
    name: str,
    role: str | None,
    agents: tuple[str, ...],
    file: Path | None,
    gateway: bool,  # noqa: FBT001 - click passes it
) -> None:
    """Write a new token for NAME, and print the lines that let it in."""
    if odd := [word for word in (name, *agents) if not is_name(word)]:
        raise click.UsageError(f"invalid name {shortened(odd[0])}")
    chosen = role or ("admin" if gateway else "agent")
    if gateway and chosen != "admin":
        raise click.UsageError("a gateway's token is an admin's; leave --role out")
    if chosen == "agent" and not agents:
        raise click.UsageError("--agent AGENT is needed: whose kernels NAME may create")
    if chosen == "admin" and agents:
        raise click.UsageError("an admin is for all agents; leave --agent out")
    path = (file or FOLDER / name).absolute()
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="ascii") as new:
            new.write(f"{secrets.token_urlsafe(_BYTES)}\n")
    except FileExistsError:
        raise click.ClickException(f"{path} exists; remove it first, or name another") from None
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from None
    lines: dict[str, object] = {"name": name, "file": str(path), "role": chosen}
    lines |= {"agents": list(agents)} if agents else {}
    lines |= {"gateway": True} if gateway else {}
    entry = tomlkit.dumps(lines)
    click.echo(f"[[rpc.tokens]]\n{entry}", nl=False)

"""The commands `agentctl token …`: files with bearer tokens for TCP."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import click
import tomlkit

from agentd.cli.output import CommandError, print_text
from agentd.client import Client
from agentd.core.names import is_name, quote_untrusted
from agentd.errors import AgentdError, ConfigRefused, Unreachable
from agentd.program.parameters import FilePath

FOLDER = Path("/etc/agentd/tokens")
_BYTES = 32


@click.group()
def token() -> None:
    """Create and revoke tokens for TCP."""


@token.command("create")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["admin", "agent", "read"]),
    help="Role of the token. Default: agent.",
)
@click.option("--agent", "agents", multiple=True, help="Agent of the token; may be repeated.")
@click.option(
    "--file", type=FilePath(path_type=Path), help=f"File to write. Default: {FOLDER}/NAME."
)
@click.option("--gateway", is_flag=True, help="Allow a gateway to act for its callers.")
def create_token(
    name: str,
    role: str | None,
    agents: tuple[str, ...],
    file: Path | None,
    gateway: bool,
) -> None:
    """Create a token and print its settings.

    Writes a new file with mode 0600 and prints the entry for agent.toml. No daemon is asked.
    """
    if invalid := [word for word in (name, *agents) if not is_name(word)]:
        raise click.UsageError(f"invalid name {quote_untrusted(invalid[0])}")
    chosen_role = role or ("admin" if gateway else "agent")
    if gateway and chosen_role != "admin":
        raise click.UsageError(
            f"invalid role {chosen_role} for a gateway: expected admin; leave --role out"
        )
    if chosen_role == "agent" and not agents:
        raise click.UsageError(
            "missing --agent: role agent needs the agents whose kernels it may create"
        )
    if chosen_role == "admin" and agents:
        raise click.UsageError("role admin is for all agents; leave --agent out")
    path = (file or FOLDER / name).absolute()
    os.umask(os.umask(0o777) | 0o022)  # no other user may write to the folders of the path
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="ascii") as token_file:
            token_file.write(f"{secrets.token_urlsafe(_BYTES)}\n")
    except FileExistsError:
        raise CommandError(f"{path} exists; remove it, or choose another with --file") from None
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    settings: dict[str, object] = {"name": name, "file": str(path), "role": chosen_role}
    settings |= {"agents": list(agents)} if agents else {}
    settings |= {"gateway": True} if gateway else {}
    entry = tomlkit.dumps(settings)
    print_text(f"[[rpc.tokens]]\n{entry}", nl=False)


@token.command("revoke")
@click.argument("name")
@click.option(
    "--config", "config_file", metavar="FILE", help="agent.toml. Default: that of agentd."
)
def revoke_token(name: str, config_file: str | None) -> None:
    """Revoke a token and end its connections.

    Removes its entry from the configuration, reloads the running daemon and deletes the token's
    file. The file stays if the daemon refuses the reload.

    Exit status: 0 the token is revoked, 1 it is still valid.
    """
    from agentd.config.document import without_token, write_file
    from agentd.config.loading import find_config, load_text
    from agentd.state.locks import lock_holder
    from agentd.tomlfile.regular_files import read_regular

    path = find_config(config_file, os.environ)
    if path is None:
        raise CommandError("no configuration file found; name it with --config")
    try:
        text, file = without_token(read_regular(path).text, name, path)
        settings = load_text(text, path, os.environ).settings
        write_file(path, text)
        print_text(f"removed {name} from {path}")
        try:
            needs_restart = Client(str(settings.rpc.socket), retry_s=0).reload()["needs_restart"]
        except Unreachable as error:
            if (pid := lock_holder(settings.node.state_dir)) is not None:
                reason = f"process {pid} holds {settings.node.state_dir}, and {error}"
                raise CommandError(f"{name} is still valid: {reason}") from None
            print_text(f"not reloaded: no daemon runs: {error}")
        except AgentdError as error:
            reason = f"{name} is still valid: not reloaded: {error}"
            raise CommandError(reason) from None
        else:
            if pending := [key for key in needs_restart if key.startswith("rpc.")]:
                reason = f"{name} is valid until agentd restarts: {', '.join(pending)} differ"
                raise CommandError(reason)
            print_text("reloaded agentd")
        file.unlink(missing_ok=True)
        print_text(f"deleted {file}")
    except ConfigRefused as error:
        raise CommandError("; ".join(error.lines())) from None
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise CommandError(f"{path}: {cause}") from None

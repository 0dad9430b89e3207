"""`python -m agentd`."""

from agentd.cli.agentd.main import agentd

if __name__ == "__main__":
    agentd()

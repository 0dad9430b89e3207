"""`python -m agentd`."""

from agentd.cli.agentd import agentd

if __name__ == "__main__":
    agentd()

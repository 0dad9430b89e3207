"""The command `agentd`: the daemon, its configuration and its plugins."""

"""The command `agentctl`: everything that the RPC offers."""

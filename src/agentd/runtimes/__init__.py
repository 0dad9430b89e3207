"""Runtimes: one folder each, behind the protocol of `agentd.services`."""

"""Calls to nodes, and what is read of one."""

"""Calls to nodes, and readings of one."""

"""Cgroups of the host: hierarchies, limits and counters."""

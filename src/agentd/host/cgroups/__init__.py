"""Cgroups of the host: their hierarchies, and what they count."""

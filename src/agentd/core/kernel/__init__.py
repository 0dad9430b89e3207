"""Kernels: states, requests, plans, records and observations."""

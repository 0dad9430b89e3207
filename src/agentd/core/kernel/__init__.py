"""Kernels: states, requests, plans, records, and what is observed of them."""

"""Kernels as plain processes, each under a shim."""

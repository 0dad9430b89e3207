"""Kernels as containers of a Docker Engine."""

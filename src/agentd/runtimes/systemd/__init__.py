"""Kernels as transient units of systemd."""

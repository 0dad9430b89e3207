"""The life of kernels: create, stop, delete, exec, retention and reconciliation."""

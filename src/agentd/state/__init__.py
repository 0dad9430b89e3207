"""The state folder: everything that survives a restart besides the kernels."""

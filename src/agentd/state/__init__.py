"""The state folder: what the node remembers besides its kernels."""

"""Parts that kernels on the host share: exec, folders and limits."""

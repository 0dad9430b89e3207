"""What kernels that are processes of the host share: exec, folders, limits."""

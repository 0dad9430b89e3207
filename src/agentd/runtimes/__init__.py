"""What runs kernels: one folder for each runtime, behind the protocol of `agentd.services`."""

"""Slurm on agentd: jobs take their GPUs from agentd as claims.

Slurm queues, agentd decides which device is whose. A prolog claims a job's GPUs, an epilog releases
them, and `agentd-slurm sync` blocks in Slurm the GPUs that others hold.
"""

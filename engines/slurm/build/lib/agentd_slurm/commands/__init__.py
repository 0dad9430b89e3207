"""The commands that Slurm and operators run."""

"""What this machine is, and how it is spoken to: probe, processes, cgroups, systemd."""

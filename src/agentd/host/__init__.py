"""The host: its hardware, processes, cgroups and systemd."""

"""The systemd of the host: whether it is there, its manager over D-Bus, its paths."""

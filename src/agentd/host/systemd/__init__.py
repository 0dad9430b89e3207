"""The systemd of the host: availability, the manager over D-Bus, object paths."""

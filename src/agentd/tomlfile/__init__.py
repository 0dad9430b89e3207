"""Settings from TOML files and the environment, with the origin of each."""

from end_to_end.fleet.fixtures import mortal, name_server, pool, running, servers, world

__all__ = ["mortal", "name_server", "pool", "running", "servers", "world"]

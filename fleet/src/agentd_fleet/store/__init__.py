"""The store: routes and nodes, in etcd or in one SQLite file."""

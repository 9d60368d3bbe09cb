"""The config: its keys, its problems, and the specs that it compiles to."""

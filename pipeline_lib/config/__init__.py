"""The config: its keys, its checks, and the specs that it compiles to."""

"""The state of every experiment of a store, and how it is shown."""

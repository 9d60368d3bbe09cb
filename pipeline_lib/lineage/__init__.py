"""Where a model comes from."""

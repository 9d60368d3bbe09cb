"""The comparison of several experiments."""

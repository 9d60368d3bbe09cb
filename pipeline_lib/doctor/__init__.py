"""Looks at a machine before anything is spent on it: what it has, how fast it is, what is wrong and what to set."""

"""Starts the ranks of a training, waits for them, and says what became of them."""

"""Evaluation of the base and the tuned model on held-out data."""

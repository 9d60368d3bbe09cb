"""Measures what the plan computes with: rates of this machine, and the parts of a model at their real shapes."""

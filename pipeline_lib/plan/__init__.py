"""Predict what a run will take before it starts: memory, time, network and cost."""

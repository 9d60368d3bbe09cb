"""What a run will take before it runs: memory, time, network and cost."""

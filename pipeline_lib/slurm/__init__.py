"""Jobs of SLURM: what they ask for, and queueing them again."""

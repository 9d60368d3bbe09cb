"""What the pipeline knows of SLURM: its jobs, its queue, and what they ask for."""

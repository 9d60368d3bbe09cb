"""SLURM jobs: what they request, waiting for them, and requeueing them."""

"""One rank of a training run: loop, step, strategies, checkpoints."""

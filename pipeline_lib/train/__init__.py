"""One rank of a training: loop, step, strategies, checkpoints."""

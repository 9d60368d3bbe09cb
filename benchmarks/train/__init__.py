"""The training step against what users run today: the same model, documents and batches, in one run."""

"""The model folder that leaves the pipeline."""

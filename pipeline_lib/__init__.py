"""Fine-tunes Qwen3 models as a pipeline of sealed stages; knows nothing of Snakemake or DVC."""

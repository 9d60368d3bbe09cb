"""Fine-tunes Qwen3 models as a pipeline of sealed stages; its stages know nothing of Snakemake or DVC."""

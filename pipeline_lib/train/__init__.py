"""The distributed training stage: a launcher, ranks, strategies, one short loop, sealed checkpoints."""

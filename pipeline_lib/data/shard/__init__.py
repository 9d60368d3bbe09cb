"""The shard stage: token arrays to packed blocks, and the order in which they are trained on."""

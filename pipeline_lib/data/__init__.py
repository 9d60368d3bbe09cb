"""From rows to packed blocks: download, tokenize, shard."""

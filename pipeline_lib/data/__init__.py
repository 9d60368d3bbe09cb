"""The data stages, from rows to packed blocks: download, tokenize, shard."""

"""From a config's sources to packed training blocks, without torch: download, tokenize, shard, and the sample order."""

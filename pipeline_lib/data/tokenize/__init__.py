"""The tokenize stage: rows to supervised token arrays, in worker processes, with every row accounted for."""

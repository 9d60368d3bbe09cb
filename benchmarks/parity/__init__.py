"""Ours against a plain loop of transformers and torch: the same losses on real text, within bf16's noise."""

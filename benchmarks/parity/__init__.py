"""Ours against a plain transformers loop: equal losses on real text, within bf16's noise."""

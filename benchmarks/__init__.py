"""Measures what the README claims: `python -m benchmarks`. Ratios within one run, medians of several."""

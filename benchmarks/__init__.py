"""Measures what docs/data.md claims: `python -m benchmarks`.

Ratios within one run, medians of several.
"""

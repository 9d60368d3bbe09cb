"""Lineage: what a model was made from, recorded in its folder and checked link by link."""

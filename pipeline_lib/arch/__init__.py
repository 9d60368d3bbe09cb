"""What planner, data and trainer know of a model, without torch: sizes, files, layer runs.

This covers the model families too.
"""

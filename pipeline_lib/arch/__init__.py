"""What planner, data and trainer all know of a model, without torch: sizes, families, files, how its layers run."""

"""Experiment trackers: processes that feed TensorBoard, SwanLab, Weights & Biases and MLflow."""

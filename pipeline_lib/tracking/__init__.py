"""Processes that feed TensorBoard, SwanLab, Weights & Biases and MLflow."""

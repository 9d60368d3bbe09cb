"""The model: its geometry and files, read without torch, and transformers' Qwen built from them."""

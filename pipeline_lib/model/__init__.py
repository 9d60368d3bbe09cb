"""The model: its geometry and files without torch, and transformers' Qwen built from them."""

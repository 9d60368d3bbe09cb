"""The model with torch: transformers' Qwen built from files, loaded, adapted and computed."""

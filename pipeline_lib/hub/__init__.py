"""Hugging Face and ModelScope: pinned, verified downloads."""

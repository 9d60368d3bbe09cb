"""Tests that need CUDA GPUs."""

from tests.train.conftest import arena

__all__ = ["arena"]

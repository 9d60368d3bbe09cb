"""Tests that need CUDA GPUs."""

from tests.train.conftest import arena, whole

__all__ = ["arena", "whole"]

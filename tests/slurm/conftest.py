from tests.pipeline.conftest import small

__all__ = ["small"]

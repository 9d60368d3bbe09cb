"""What is known of a GPU on machines without one, by torch's builds for CUDA and for CPUs."""

import pytest
import torch

from pipeline_lib.model import gpu
from pipeline_lib.model.gpu import has_triton, why_not_compiled

FIRST_GPU = torch.device("cuda", 0)


@pytest.fixture(params=["a build for CUDA", "a build for CPUs"])
def without_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Why there are no kernels.

    A build for CUDA raises when it is asked for the properties of a GPU.
    """

    def no_driver(_: int) -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    reason = "" if request.param == "a build for CUDA" else "this torch brings no Triton"
    monkeypatch.setattr(gpu, "why_no_kernels", lambda: reason)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", no_driver)
    has_triton.cache_clear()
    return reason


def test_no_kernels_are_built_for_a_gpu_that_is_not_there(without_a_gpu: str) -> None:
    assert not has_triton(FIRST_GPU)
    assert why_not_compiled(FIRST_GPU) == without_a_gpu


@pytest.mark.parametrize(("generation", "has_kernels"), [(7, False), (8, True), (9, True)])
def test_kernels_are_built_from_ampere_on(
    generation: int, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "why_no_kernels", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = type("Properties", (), {"major": generation})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    has_triton.cache_clear()
    assert has_triton(FIRST_GPU) == has_kernels
    assert (why_not_compiled(FIRST_GPU) == "") == has_kernels
    has_triton.cache_clear()

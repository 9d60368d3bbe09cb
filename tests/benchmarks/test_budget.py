"""A trace of a step, written by hand, taken apart into kinds of kernels that add up to the step."""

from typing import Any

from pytest import approx, mark

from benchmarks.budget.kinds import IDLE, kind_of, most_expensive, shares_of
from benchmarks.budget.trace import Kernel, kernels_of

MAIN, BACKWARD = 1, 2  # threads


def host(
    kind: str, name: str, thread: int, begin: float, end: float, **known: Any
) -> dict[str, Any]:
    event = {"ph": "X", "cat": kind, "name": name, "pid": 9, "tid": thread, "ts": begin}
    return {**event, "dur": end - begin, "args": known}


def operator(name: str, thread: int, begin: float, end: float, number: int = 0) -> dict[str, Any]:
    return host("cpu_op", name, thread, begin, end, **{"External id": number})


def launched(
    name: str, thread: int, at: float, number: int, time: tuple[float, float]
) -> list[dict[str, Any]]:
    launch = host("cuda_runtime", "cudaLaunchKernel", thread, at, at + 1, correlation=number)
    return [launch, host("kernel", name, 7, *time, correlation=number)]


def test_a_kernel_has_the_operators_of_its_thread_and_the_marks_of_any() -> None:
    events = [
        host("user_annotation", "budget:update", MAIN, 0, 100),
        operator("aten::linear", MAIN, 10, 30),
        operator("aten::mm", MAIN, 12, 20),
        operator("aten::add", MAIN, 30, 40),
        operator("MulBackward0", BACKWARD, 5, 90),
        *launched("gemm", MAIN, 15, 1, (200, 210)),
        *launched("second", MAIN, 25, 2, (210, 211)),
        *launched("third", MAIN, 30, 3, (211, 212)),
        *launched("of backward", BACKWARD, 50, 4, (212, 213)),
        *launched("late", MAIN, 150, 5, (213, 214)),
    ]
    found = {kernel.name: kernel for kernel in kernels_of(events)}
    assert found["gemm"].operators == ("aten::linear", "aten::mm")
    assert found["gemm"].time == approx((200e-6, 210e-6))
    assert found["second"].operators == ("aten::linear",)
    assert found["third"].operators == ("aten::add",)
    assert found["of backward"].operators == ("MulBackward0",)
    assert found["of backward"].marks == {"update"}
    assert found["late"].marks == frozenset() == frozenset(found["late"].operators)


def test_a_launch_of_an_unknown_thread_is_found_by_the_operators_number() -> None:
    events = [
        operator("aten::mm", MAIN, 10, 20, number=33),
        host("cuda_runtime", "cudaLaunchKernel", 3, 12, 13, correlation=1),
        host("kernel", "gemm", 7, 50, 60, correlation=1, **{"External id": 33}),
    ]
    (kernel,) = kernels_of(events)
    assert kernel.operators == ("aten::mm",)


def kernel(
    name: str, *operators: str, marks: tuple[str, ...] = (), time: tuple[float, float] = (0, 1)
) -> Kernel:
    return Kernel(name, time, operators, frozenset(marks))


@mark.parametrize(
    ("found", "kind"),
    [
        (kernel("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT", "aten::linear", "aten::mm"), "GEMM"),
        (kernel("void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd>"), "attention"),
        (
            kernel(
                "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "qwen3_pipeline::x"
            ),
            "attention",
        ),
        (
            kernel(
                "void at::native::elementwise_kernel",
                "qwen3_pipeline::cudnn_attention",
                "aten::mul",
            ),
            "attention",
        ),
        (kernel("triton_tem_fused_flex_attention_0"), "attention"),
        (kernel("triton_poi_fused_cudnn_attention_mul_3"), "pointwise and norms"),
        (
            kernel("void at::native::vectorized_elementwise_kernel<4>", "aten::mul"),
            "pointwise and norms",
        ),
        (
            kernel("void at::native::elementwise_kernel<128>", "aten::_to_copy", "aten::copy_"),
            "casts",
        ),
        (kernel("void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel"), "copies"),
        (
            kernel("multi_tensor_apply_kernel", "fsdp::all_gather_copy_in", "aten::_foreach_copy_"),
            "copies",
        ),
        (kernel("Memcpy DtoH (Device -> Pinned)", "aten::item"), "copies"),
        (kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", marks=("update",)), "communication"),
        (
            kernel("nvjet_tst_256x128", "_CrossEntropy", "aten::mm", marks=("head",)),
            "head and loss",
        ),
        (
            kernel("elementwise", "autograd::engine::evaluate_function: _CrossEntropyBackward"),
            "head and loss",
        ),
        (
            kernel("multi_tensor_apply_kernel", "Optimizer.step#AdamW.step", "aten::_fused_adamw_"),
            "optimizer",
        ),
        (kernel("something new"), "other"),
    ],
)
def test_a_kernel_is_of_one_kind(found: Kernel, kind: str) -> None:
    assert kind_of(found) == kind


def test_the_shares_add_up_to_the_step_and_tell_exposed_communication_from_hidden() -> None:
    kernels = [
        kernel("gemm", time=(2.0, 6.0)),
        kernel("triton_poi_fused_mul", time=(6.0, 7.0)),
        kernel("ncclDevKernel_AllGather", time=(5.0, 9.0)),
        kernel("Memcpy HtoD", time=(8.0, 12.0)),
    ]
    shares = {share.kind: share for share in shares_of(kernels, (0.0, 20.0), 2)}
    assert sum(share.exposed_s for share in shares.values()) == approx(10.0)
    assert shares["GEMM"].exposed_s == approx(2.0)
    assert (shares["communication"].exposed_s, shares["communication"].total_s) == approx(
        (1.0, 2.0)
    )
    assert (shares["copies"].exposed_s, shares["copies"].total_s) == approx((1.5, 2.0))
    assert shares[IDLE].exposed_s == approx(5.0)
    assert shares["GEMM"].kernels == 0.5


def test_names_are_added_up_and_sorted() -> None:
    kernels = [
        kernel("gemm a"),
        kernel("gemm b", time=(0, 3)),
        kernel("gemm a"),
        kernel("gemm " + 200 * "c"),
    ]
    found = most_expensive(kernels, 1, lambda each: each.name)
    assert [(share.kind[:12], share.exposed_s) for share in found[:2]] == [
        ("GEMM: gemm b", 3),
        ("GEMM: gemm a", 2),
    ]
    assert len(found[2].kind) == len("GEMM: ") + 100

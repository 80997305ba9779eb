"""Classes of kernels by their names, and what a trace of a few steps adds up to."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from wholestep.cli.suite.kernel_profile import (
    KernelClass,
    KernelEvent,
    after_marker,
    breakdown,
    class_of,
    device_events,
    read_trace,
)

ATEN = "void at::native::"
NAMES = {
    KernelClass.PRODUCTS: [
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_64x4_nt_align8>(...::Params)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "void splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false, false>(...)",
        "triton_tem_fused_addmm_gelu_7",
    ],
    KernelClass.ATTENTION: [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_4_64x128x64_4x1x1_kernel0_0",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128>>(...)",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*, void*)",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)",
    ],
    KernelClass.NCCL: [
        "_add",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "Memcpy PtoP (Device -> Device)",
        "void c10d::symmetric_memory::barrier_kernel(unsigned int**, unsigned long, int, int, unsigned long)",
        "ncclSymkDevKernel_AllReduce_AGxLL_R_Sum_bf16(ncclSymkDevWorkArgs4K)",
    ],
    KernelClass.UPDATE: [
        "update_lists",
        "update_numbers",
        f"{ATEN}(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, "
        "at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>>(...)",
        "triton_poi_fused__to_copy_add_div_mul_rsub_sqrt_sub_41",
        "triton_for_fused_3",
    ],
    KernelClass.LOSS: [
        "_cross_entropy",
        f"{ATEN}(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, LogSoftMaxForwardEpilogue>(...)",
        f"{ATEN}(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(...)",
        "triton_red_fused__log_softmax_nll_loss_forward_2",
        "triton_red_fused__to_copy_amax_exp_log_sub_sum_4",
    ],
    KernelClass.NORMS: [
        f"{ATEN}(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(...)",
        f"{ATEN}(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 64u, 1u>(...)",
        "_sum_columns",
        "triton_per_fused__to_copy_add_native_layer_norm_native_layer_norm_backward_12",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
    ],
    KernelClass.COMBINED: ["triton_poi_fused_5"],
    KernelClass.COPIES: [
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        f"{ATEN}elementwise_kernel<128, 4, gpu_kernel_impl_nocast<direct_copy_kernel_cuda(TensorIteratorBase&)>>(...)",
        f"{ATEN}vectorized_elementwise_kernel<8, bfloat16_copy_kernel_cuda(TensorIteratorBase&)>(...)",
        f"{ATEN}(anonymous namespace)::CatArrayBatchedCopy_contig<OpaqueType<4u>, unsigned int, 1, 128, 1>(...)",
        "triton_poi_fused__to_copy_3",
        "triton_poi_fused__to_copy_t_view_11",
    ],
    KernelClass.POINTWISE: [
        f"{ATEN}vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>>(...)",
        f"{ATEN}reduce_kernel<512, 1, ReduceOp<float, func_wrapper_t<float, sum_functor<float>>>>(...)",
        "triton_poi_fused_gelu_gelu_backward_5",
        "triton_poi_fused__scaled_dot_product_cudnn_attention_backward_mul_9",
        "triton_red_fused_mm_sum_2",
        "triton_poi_fused_tanh_1",
    ],
}


@pytest.mark.parametrize(("wanted", "name"), [(one, name) for one, names in NAMES.items() for name in names])
def test_a_kernel_is_known_by_its_name(wanted: KernelClass, name: str) -> None:
    assert class_of(name) is wanted


def test_every_class_has_a_name_that_is_tested() -> None:
    assert NAMES.keys() == set(KernelClass)


def event(name: str, start_us: float, took_us: float, cat: str = "kernel", ph: str = "X") -> dict[str, Any]:
    return {"ph": ph, "cat": cat, "name": name, "ts": start_us, "dur": took_us, "pid": 0, "tid": 7, "args": {}}


def test_a_trace_of_two_steps_adds_up(tmp_path: Path) -> None:
    """us:      0    10   20   30   40   50   60   70   80  100
    products    ####           (marker 15)   ####      ####
    NCCL                            #####  ########
    """
    path = tmp_path / "trace.json"
    events = [
        event("nvjet_tst_64x64", 0, 10),
        event("void at::native::vectorized_elementwise_kernel<4, at::native::BitwiseXorFunctor<int>>", 12, 3),
        event("nvjet_tst_64x64", 20, 10),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 10),
        event("nvjet_tst_64x64", 50, 10),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 55, 25),
        event("Memset (Device)", 80, 20, cat="gpu_memset"),
        event("cudaLaunchKernel", 0, 500, cat="cuda_runtime"),
        event("aten::mm", 0, 500, cat="cpu_op"),
        {"ph": "M", "name": "process_name", "pid": 0, "args": {}},
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    found = breakdown(after_marker(read_trace(str(path))), num_steps=2, num_longest=1)
    assert found is not None
    assert found.step_ms == pytest.approx(0.040)  # from 20 to 100
    assert found.exposed_ms == pytest.approx(0.015)  # 40 to 50 and 60 to 80
    assert found.idle_ms == pytest.approx(0.005)  # 30 to 40
    assert found.busy_ms[KernelClass.PRODUCTS] == pytest.approx(0.010)
    assert found.busy_ms[KernelClass.NCCL] == pytest.approx(0.0175)
    assert found.busy_ms[KernelClass.COPIES] == pytest.approx(0.010)
    assert sum(found.busy_ms.values()) == pytest.approx(0.0375)
    assert found.kernels == 2.5
    assert found.longest == (("ncclDevKernel_AllReduce_Sum_f32_RING_LL", pytest.approx(0.0175)),)


def test_copies_within_a_device_count_as_communication_where_gradients_travel_so() -> None:
    events = [
        KernelEvent(name="nvjet", start_us=0, stop_us=4),
        KernelEvent(name="Memcpy DtoD (Device -> Device)", start_us=2, stop_us=9),
    ]
    within, between = (breakdown(events, num_steps=1, by_copies=flag) for flag in (False, True))
    assert within is not None
    assert between is not None
    assert (within.exposed_ms, between.exposed_ms) == (0, 0.005)
    assert within.busy_ms[KernelClass.COPIES] == between.busy_ms[KernelClass.NCCL] == 0.007


def test_without_a_marker_everything_counts() -> None:
    events = [KernelEvent(name="a", start_us=1, stop_us=2)]
    assert after_marker(events) == events
    assert breakdown([], num_steps=3) is None


def test_a_trace_of_this_torch_is_read(tmp_path: Path) -> None:
    """On the CPU there is no kernel in it, and operators are none."""
    path = str(tmp_path / "trace.json")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(3).add_(1)
    profiler.export_chrome_trace(path)
    trace = json.loads(Path(path).read_text())
    assert any(one.get("cat") == "cpu_op" for one in trace["traceEvents"])
    assert device_events(trace) == []

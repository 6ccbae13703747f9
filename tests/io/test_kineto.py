"""Traces of torch's profiler become kernels and collectives with their sizes."""

import gzip
import json

import pytest

from axonn_tune.errors import FileError
from axonn_tune.io.kineto import load_trace

# Keys and names as libkineto/src/output_json.cpp and torch 2.4 to 2.13 write them.
NCCL = {
    "Collective name": "_allgather_base",
    "In msg nelems": 1000,
    "Out msg nelems": 8000,
    "Group size": 8,
    "dtype": "BFloat16",
    "In split size": "[]",
    "Out split size": "[]",
    "Process Group Name": "3",
    "Process Group Description": "mesh_dp_shard",
    "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
}


def kernel(name, microseconds, external_id=0, **arguments):
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": 1.0,
        "dur": microseconds,
        "args": {"External id": external_id, "stream": 7, **arguments},
    }


def launcher(name, external_id, dims):
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "ts": 0.0,
        "dur": 3,
        "args": {"External id": external_id, "Input Dims": dims},
    }


@pytest.fixture
def trace(tmp_path):
    """Write events as a trace and read it."""

    def read(*events, text=None, name="trace.json"):
        path = tmp_path / name
        path.write_text(json.dumps({"traceEvents": events}) if text is None else text)
        return load_trace(path)

    return read


@pytest.mark.parametrize(
    ("op", "dims", "shape"),
    [
        ("aten::mm", [[32, 64], [64, 48]], (32, 48, 64)),
        ("aten::addmm", [[48], [32, 64], [64, 48], [], []], (32, 48, 64)),
        ("aten::bmm", [[4, 32, 64], [4, 64, 48]], (32, 48, 64)),
    ],
)
def test_a_product_has_the_sizes_of_the_operation_that_launched_it(trace, op, dims, shape):
    read = trace(launcher(op, 5, dims), kernel("nvjet_tst_128x256_64x4_2x1_v_bz_NNT", 10.5, 5))
    (product,) = read.operations
    assert product.kind == "product" and product.shape == shape
    assert product.seconds == pytest.approx(10.5e-6)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "product"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32", "product"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention, backward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention, backward"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", "optimizer"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "memory-bound"),
        ("Memcpy DtoD (Device -> Device)", "memory-bound"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevComm*, uint64_t)", "reduce_scatter"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", "all_reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)", "collective"),
    ],
)
def test_the_name_of_a_kernel_tells_its_kind(trace, name, kind):
    (operation,) = trace(kernel(name, 1)).operations
    assert operation.kind == kind and operation.shape == ()


@pytest.mark.parametrize(
    ("called", "kind", "nbytes"),
    [
        ("_allgather_base", "all_gather", 16000),
        ("allgather_into_tensor_coalesced", "all_gather", 16000),
        ("_reduce_scatter_base", "reduce_scatter", 2000),
        ("allreduce", "all_reduce", 2000),
        ("all_to_allv", "all_to_all", 16000),
        ("send", "send_recv", 16000),
        ("broadcast", "collective", 16000),
    ],
)
def test_a_collective_has_the_bytes_of_its_full_buffer(trace, called, kind, nbytes):
    """RCCL names every kernel alike; the arguments tell them apart."""
    event = kernel("void rcclGenericKernel<1, false>", 7, **{**NCCL, "Collective name": called})
    (operation,) = trace(event).operations
    assert (operation.kind, operation.nbytes, operation.n_ranks) == (kind, nbytes, 8)
    assert operation.group == "mesh_dp_shard"


def test_steps_are_counted(trace):
    steps = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "dur": 1}
        for n in (3, 4, 4)
    ]
    assert trace(kernel("a", 1), *steps).n_steps == 2
    assert trace(kernel("a", 1)).n_steps == 1


def test_a_group_without_a_description_is_read_though_its_json_is_broken(trace):
    """The event is as torch 2.4 wrote it."""
    event = json.dumps({"traceEvents": [kernel("ncclDevKernel_AllGather", 1, **NCCL)]})
    read = trace(text=event.replace('"mesh_dp_shard"', ""))
    assert read.operations[0].group == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "malformed JSON"),
        ('{"traceEvents": [{"ph": "X", "na', "malformed JSON"),
        ('{"traceEvents": NaN}', "NaN is no number"),
        ("{}", "not a trace of torch's profiler"),
        ("3", "not a trace of torch's profiler"),
        ('{"traceEvents": []}', "neither kernels nor operations"),
        ('{"traceEvents": [{"ph": "X", "name": 3, "dur": 1}]}', "neither kernels"),
        (json.dumps([kernel("nccl", 1, **{**NCCL, "Group size": "many"})]), "malformed event"),
        (json.dumps([kernel("gemm", 10**400)]), "malformed event"),
        (json.dumps([kernel("gemm", 1, [1])]), "malformed event"),
        (
            json.dumps([launcher("aten::mm", 1, [[2], [3]]), kernel("gemm", 1, 1)]),
            "malformed event",
        ),
    ],
)
def test_what_is_no_trace_is_refused(trace, text, said):
    with pytest.raises(FileError, match=f"trace.json.*{said}"):
        trace(text=text)


def test_a_packed_trace_is_read(tmp_path, trace):
    plain = trace(kernel("gemm", 5), kernel("ncclDevKernel_AllGather", 7, **NCCL))
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress((tmp_path / "trace.json").read_bytes()))
    assert load_trace(packed) == plain
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(FileError, match=r"trace\.json\.gz: (the gzip file is cut|not a gzip file)"):
        load_trace(packed)
    packed.write_bytes(b"{}")
    with pytest.raises(FileError, match=r"trace\.json\.gz: not a gzip file of UTF-8 text"):
        load_trace(packed)


def test_a_small_file_that_holds_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("axonn_tune.io.kineto.LARGEST_TRACE_BYTES", 10_000)
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(b" " * 1_000_000))
    with pytest.raises(FileError, match=r"trace\.json\.gz holds too much"):
        load_trace(packed)


def test_what_torch_writes_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile

    weight = torch.randn(64, 48, requires_grad=True)
    queries = torch.randn(1, 4, 16, 8, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        torch.mm(torch.randn(32, 64, requires_grad=True), weight).sum().backward()
        torch.nn.functional.scaled_dot_product_attention(queries, queries, queries).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    read = load_trace(tmp_path / "trace.json")
    shapes = sorted(op.shape for op in read.operations if op.kind == "product")
    assert shapes == [(32, 48, 64), (32, 64, 48), (64, 48, 32)]
    kinds = {op.kind for op in read.operations}
    assert kinds == {"product", "attention", "attention, backward"}

"""What a rehearsal records of small programs, whose operations and memory are known by hand."""

import gc
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from axonn_tune.errors import AxonnTuneError, FileError, InputError
from axonn_tune.runtime.rehearsal.script import rehearse_script
from axonn_tune.runtime.rehearsal.tape import as_one_kernel
from axonn_tune.runtime.rehearsal.world import rehearsed
from axonn_tune.spec.rehearsal import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER_STATES,
    WEIGHTS,
    FusedAttention,
    Message,
    OtherKernel,
    Product,
)


def of_kind(counts, kind):
    return Counter({op: count for op, count in counts.items() if isinstance(op, kind)})


def test_products_have_their_sizes_and_modes():
    with rehearsed(1) as tape:
        a, b = torch.empty(3, 5), torch.empty(5, 7)
        tape.begin_step()
        torch.mm(a, b)
        torch.mm(a, torch.empty(7, 5).t())
        torch.mm(torch.empty(5, 3).t(), b)
        torch.bmm(torch.empty(2, 3, 5), torch.empty(2, 5, 7))
    assert of_kind(tape.counts, Product) == {
        Product(3, 7, 5, "NN", "fp32"): 1,
        Product(3, 7, 5, "NT", "fp32"): 1,
        Product(3, 7, 5, "TN", "fp32"): 1,
        Product(3, 7, 5, "NN", "fp32", batch=2): 1,
    }


def test_a_linear_layer_has_three_products_and_attention_two_kernels():
    with rehearsed(1) as tape:
        layer = nn.Linear(5, 7)
        q = torch.empty(2, 4, 16, 8, dtype=torch.bfloat16, requires_grad=True)
        tape.begin_step()
        layer(torch.empty(3, 5, requires_grad=True)).sum().backward()
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    sizes = {(op.m, op.n, op.k) for op in of_kind(tape.counts, Product)}
    assert sizes == {(3, 7, 5), (3, 5, 7), (7, 5, 3)}
    assert of_kind(tape.counts, FusedAttention) == {
        FusedAttention(2, 4, 16, 8, False, True, "bf16"): 1,
        FusedAttention(2, 4, 16, 8, True, True, "bf16"): 1,
    }


def test_other_kernels_move_what_they_read_and_write():
    with rehearsed(1) as tape:
        x, table = torch.empty(1000), torch.empty(10**6, 10)
        rows = torch.zeros(50, dtype=torch.int64)
        tape.begin_step()
        x.add_(x)
        x.view(10, 100).t()
        torch.empty(5)
        torch.index_select(table, 0, rows)
    moved = {op.name: op.nbytes for op in tape.counts}
    # In place: two operands read, one written. Rows: their numbers, and each read and written once.
    assert moved == {"add_": 3 * 4000, "index_select": 50 * 8 + 2 * 50 * 10 * 4}


def test_messages_have_the_ranks_of_their_group():
    with rehearsed(12) as tape:
        mesh = init_device_mesh("cpu", (3, 4), mesh_dim_names=("outer", "inner"))
        tape.begin_step()
        full, part = (torch.empty(n, dtype=torch.bfloat16) for n in (400, 100))
        group = mesh["inner"].get_group()
        dist.all_reduce(full, group=mesh.get_group("outer"))
        dist.all_gather_single(full, part, group=group)
        dist.reduce_scatter_single(torch.empty(25), torch.empty(100), group=group)
        dist.all_to_all_single(torch.empty(8), torch.empty(8), group=group)
        dist.broadcast(torch.empty(8), 0)
        dist.send(torch.empty(8), 5)
        dist.barrier()
    inner, outer = (0, 1, 2, 3), (0, 4, 8)
    assert of_kind(tape.counts, Message) == {
        Message("all_reduce", 800, "bf16", outer): 1,
        Message("all_gather", 800, "bf16", inner): 1,
        Message("reduce_scatter", 400, "fp32", inner): 1,
        Message("all_to_all", 32, "fp32", inner): 1,
        Message("broadcast", 32, "fp32", tuple(range(12))): 1,
        Message("send_recv", 32, "fp32", (0, 5)): 1,
    }
    assert [Message("all_reduce", 1, "", ranks).stride for ranks in (inner, outer)] == [1, 4]


def test_a_mesh_of_a_tensor_of_ranks_has_its_numbers():
    with rehearsed(8):
        ranks = torch.arange(8).reshape(2, 4).permute(1, 0).contiguous()
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"))
        assert dist.get_process_group_ranks(mesh.get_group("a")) == [0, 1, 2, 3]
        assert torch.empty(5).sum().item() == 1.0 and not torch.empty(5).isnan().any()


def test_the_peak_is_what_is_held_at_once():
    with rehearsed(1) as tape:
        kept = torch.empty(1000)
        tape.begin_step()
        first = torch.empty(500)
        del first
        second = torch.empty(300)
        second.untyped_storage().resize_(0)
        third = torch.empty(400)
        third.view(20, 20)
        gc.collect()
    peak_bytes, held_bytes = tape.memory.peak()
    assert peak_bytes == 4 * (1000 + 500)
    assert held_bytes[ACTIVATIONS] == peak_bytes and kept.numel() == 1000


def test_adamw_holds_weights_gradients_and_states():
    with rehearsed(1) as tape:
        layer = nn.Linear(100, 100, bias=False)
        optimizer = torch.optim.AdamW(layer.parameters())

        def step():
            layer(torch.empty(1, 100)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        tape.begin_step()
        step()
    _, held_bytes = tape.memory.peak()
    assert held_bytes[WEIGHTS] == held_bytes[GRADIENTS] == 40_000
    assert held_bytes[OPTIMIZER_STATES] == pytest.approx(80_000, abs=100)


def test_the_rms_norm_is_one_kernel_in_each_pass():
    with rehearsed(1) as tape:
        norm = nn.RMSNorm(64)
        x = torch.empty(10, 64, requires_grad=True)
        tape.begin_step()
        norm(x).sum().backward()
    names = [op.name for op in of_kind(tape.counts, OtherKernel)]
    assert [name for name in names if "norm" in name] == ["rms_norm", "rms_norm_backward"]


SCRIPT = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
weight = torch.empty(8, 8, requires_grad=True)
print("rank", dist.get_rank(), "of", dist.get_world_size())
n_steps = 0
def step():
    global n_steps
    n_steps += 1
    for _ in range(n_steps):
        torch.mm(torch.empty(4, 8), weight).sum().backward()
    dist.all_reduce(weight.grad)
"""


def test_the_second_step_of_a_script_is_recorded(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    rehearsal = rehearse_script(str(path), 16)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "rank 0 of 16\n")
    assert rehearsal.counts[Product(4, 8, 8, "NN", "fp32")] == 2
    assert rehearsal.counts[Message("all_reduce", 256, "fp32", tuple(range(16)))] == 1
    assert not dist.is_initialized()


@pytest.mark.parametrize("ending", ["del step", "raise SystemExit(0)"])
def test_a_script_without_a_step_is_recorded_whole(tmp_path, ending):
    path = tmp_path / "train.py"
    path.write_text(f"{SCRIPT}for _ in range(3): step()\n{ending}\n")
    rehearsal = rehearse_script(str(path), 16)
    assert rehearsal.counts[Product(4, 8, 8, "NN", "fp32")] == 1 + 2 + 3
    assert not rehearsal.is_one_step


def test_tensors_of_the_whole_size_that_no_rank_holds_are_not_recorded(tmp_path):
    """DTensor meets each operator for the first time here, since no other test has these sizes."""
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "model = torch.nn.Linear(8 * 97, 89, bias=False)\n"
        "fully_shard(model)\n"
        "optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
        "model(torch.randn(4, 8 * 97)).sum().backward()\n"
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "optimizer.step()\n"
    )
    rehearsal = rehearse_script(str(path), 89)
    (update,) = (o for o in rehearsal.counts if getattr(o, "name", "") == "_fused_adamw_")
    part = 4 * 8 * 97
    assert update.nbytes == pytest.approx(4 * part, rel=0.1)
    assert rehearsal.counts[update] == 1
    assert rehearsal.peak_bytes < 4 * 89 * part


@pytest.mark.parametrize(
    ("program", "error", "said"),
    [
        ("x = (", FileError, "line 1"),
        ("x = 1\ny = 1 / 0", InputError, "line 2: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", InputError, "line 1: SystemExit: 3"),
        ("x = 1", InputError, "launches no kernel"),
        ("import torch\ntorch.ones(3).numpy()", InputError, "line 2: RuntimeError"),
    ],
)
def test_a_bad_script_is_named_with_its_line(tmp_path, program, error, said):
    path = tmp_path / "train.py"
    path.write_text(program)
    with pytest.raises(error, match=r"train\.py") as raised:
        rehearse_script(str(path), 4)
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert not dist.is_initialized()


def test_what_fails_in_a_rehearsal_is_one_line():
    with pytest.raises(AxonnTuneError, match=r"^RuntimeError: "), rehearsed(2):
        torch.mm(torch.empty(2, 3), torch.empty(2, 3))
    assert not dist.is_initialized()


def test_a_mask_of_known_numbers_selects_a_known_number_of_values():
    """A router's choice that is known says how many copies each rank sends."""
    with rehearsed(2):
        mask = torch.arange(6).view(2, 3) % 2 == 0
        scores = torch.empty(2, 3, requires_grad=True)
        selected = scores.masked_select(mask)
        selected.sum().backward()
    assert selected.shape == (3,) and scores.grad.shape == (2, 3)


def test_gradients_that_are_summed_together_are_one_message():
    with rehearsed(4) as tape:
        tape.begin_step()
        with dist._coalescing_manager():
            for size in (1000, 3000):
                dist.all_reduce(torch.empty(size))
    assert tape.counts == {Message("all_reduce", 16000, "fp32", (0, 1, 2, 3)): 1}


def test_a_kernel_of_a_gpu_leaves_nothing_but_its_results():
    def gated(values):
        left, right = values.chunk(2, -1)
        return nn.functional.silu(left) * right

    peaks, kernels = [], []
    for function in (gated, as_one_kernel(gated)):
        with rehearsed(1) as tape:
            values = torch.empty(1000, 2000)
            tape.begin_step()
            function(values)
            peaks.append(tape.memory.peak()[0])
            kernels.append(of_kind(tape.counts, OtherKernel))
    megabytes = 4e6
    assert peaks == [4 * megabytes, 3 * megabytes]
    assert kernels[1] == {OtherKernel("gated", 3 * int(megabytes), "fp32"): 1}
    assert as_one_kernel(gated)(torch.ones(1, 2)).shape == (1, 1)


@pytest.mark.parametrize(
    ("function", "n_strided"),
    [
        (lambda x, row: x * row, 1),
        (lambda x, row: x * 2.0 + x, 0),
        (lambda x, row: x[:, :8].clamp(min=0.0), 1),
        (lambda x, row: x[:, :8].contiguous(), 1),
        (lambda x, row: x.t() + x.t(), 0),
        (lambda x, row: x[:16, :16].t() + x[:16, :16], 1),
        (lambda x, row: x[:8] + 1.0, 0),
        (lambda x, row: x.view(4, 1, -1) + 1.0, 0),
        (lambda x, row: x.sum(0), 0),
        (lambda x, row: x[:, :8] >= 0.0, 1),
        (lambda x, row: x.float() * row.float(), 0),
    ],
)
def test_kernels_of_one_element_at_a_time_are_known(function, n_strided):
    """A row is broadcast, a part of every row is read, or one operand lies across the other."""
    with rehearsed(1) as tape:
        values, row = (torch.empty(*n, 32, dtype=torch.bfloat16) for n in ((64,), ()))
        tape.begin_step()
        function(values, row)
    kernels = of_kind(tape.counts, OtherKernel)
    assert sum(count for kernel, count in kernels.items() if kernel.is_strided) == n_strided


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch has a GPU")
@pytest.mark.parametrize("line", ["torch.nn.Linear(8, 8).to('cuda')", "torch.cuda.set_device(0)"])
def test_a_script_that_asks_for_a_gpu_is_told_what_to_do(tmp_path, line):
    path = tmp_path / "train.py"
    path.write_text(f"import torch\n{line}\n")
    with pytest.raises(InputError, match=r"line 2: .*; a rehearsal needs no GPU, .* else 'cpu'"):
        rehearse_script(str(path), 2)

"""AxoNN itself trains on gloo ranks, and what it does is compared with the plan of its strategy.

The comparison is about the linear layers of a model's blocks, which are AxoNN's: every collective
that is started or awaited within them, and every product, in order. Embedding, head, norms, loss
and optimizer belong to the program that uses AxoNN, and are left out.
"""

import itertools
from dataclasses import dataclass, field, replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from engines.axonn_on_cpu import groups_of, launched, replace_cuda_calls
from engines.engine_plan import EngineFacts, engine_events, engine_reductions, planned_events
from engines.events import recorded
from runtime.ranks import grids, on_ranks
from worlds import machine_of

from axonn_tune.io.presets import load_engine
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import Layout, grid_layout
from axonn_tune.spec.model import Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.predict import predict
from axonn_tune.strategies.axonn.axonn4d import AXONN, Axonn4D

pytest.importorskip("axonn")

SPEC = Model("stack", n_layers=3, hidden_size=32, n_heads=8, vocab_size=128, seq_len=8, norm="rms")
BATCH = 16
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
OVERLAPS = [Overlap(*choice) for choice in itertools.product((False, True), repeat=3)]


@dataclass(frozen=True)
class Case:
    """A grid, and how AxoNN trains on it.

    `ahead_in_recompute` gathers weights ahead in each block that is formed again, as Megatron-AxoNN
    does. Without `overlapped_backward` the backward pass runs outside the context of the overlaps,
    as in nanoGPT on AxoNN. `mixed` keeps parameters in fp32 and computes in bf16, by autocast.
    """

    grid: Layout = field(default_factory=lambda: grid_layout(1, 1, 1, 1))
    overlap: Overlap = field(default_factory=Overlap)
    recompute: str = "none"
    keep_gathered_weights: bool = False
    ahead_in_recompute: bool = False
    overlapped_backward: bool = True
    dtype: str = "fp32"
    mixed: bool = False
    bias: bool = False

    @property
    def spec(self):
        return replace(SPEC, bias=self.bias, qkv_bias=self.bias, proj_bias=self.bias)

    @property
    def job(self):
        return Job(
            self.grid.n_ranks,
            BATCH,
            self.spec.seq_len,
            dtype=self.dtype,
            overlap=self.overlap,
            keep_gathered_weights=self.keep_gathered_weights,
        )

    @property
    def configuration(self):
        micro_batch = BATCH // (self.grid.size("z") * self.grid.size("data"))
        return Configuration(self.grid, micro_batch=micro_batch, recompute=self.recompute)

    @property
    def prediction(self):
        return predict(Scenario(self.spec, self.job, machine_of(), AXONN), self.configuration)

    @property
    def parameter_dtype(self):
        return torch.float32 if self.mixed else DTYPES[self.dtype]


def axonn_facts(case):
    """What AxoNN 0.2.0 does otherwise than the plan; paths are those in axonn/intra_layer.

    - Gathers ahead follow the layers once, through one forward pass (overlap_communication.py,
      `trigger_async_all_gathers`), so that the backward pass gathers a weight when it is used. A
      block that is formed again can have gathers ahead of its own, the first of which nothing hides
      (`overlap_all_gathers_for_checkpointed_forward`).
    - A scatter under way is awaited by `clear_handles`, in the same file.
    - The order of dW and dI is that of `AsyncLinear.backward` in fully_connected.py.
    - A parameter is gathered as it is stored (communication.py, `_gather`), and torch's autocast
      converts it afterwards. Its gradient is summed over data as torch stores it.
    - Biases are not summed over Z: `sync_gradients_expert_mode_depth_parallel` in __init__.py asks
      for an attribute `needs_gradient_sync` that `Linear` does not give them.
    """
    overlaps_scatters = case.overlap.ors and case.overlapped_backward
    return EngineFacts(
        late_gathers=("recompute.qkv" if case.ahead_in_recompute else "recompute", "backward"),
        overlaps_backward=case.overlapped_backward,
        scatters_awaited_at_end=overlaps_scatters,
        weight_gradient_first=overlaps_scatters,
        gathered_bytes=case.parameter_dtype.itemsize,
        gradient_bytes=case.parameter_dtype.itemsize,
        biases_summed_over_z=False,
    )


@pytest.mark.parametrize(
    ("engine", "case"),
    [("axonn", Case()), ("nanogpt", Case(overlapped_backward=False, dtype="bf16", mixed=True))],
)
def test_the_engines_that_are_predicted_have_the_recorded_facts(engine, case):
    facts = axonn_facts(case)
    program = load_engine(engine).axonn
    assert facts.overlaps_backward == program.overlaps_backward
    if program.overlaps_backward:
        assert facts.late_gathers == program.late_gathers
        assert facts.scatters_awaited_at_end == program.awaits_scatters_at_end
    of_job = DTYPES[case.dtype].itemsize
    assert facts.gathered_bytes == (program.gathered_element_bytes or of_job)


def trained(case):
    """Train for two micro-steps on this rank; return the blocks and the events of the second."""
    from engines.axonn_stack import Stack

    overlapped = launched(case.prediction)["overlapped"]
    torch.manual_seed(0)
    stack = Stack(
        case.spec, case.grid, case.recompute, case.keep_gathered_weights, case.ahead_in_recompute
    ).to(case.parameter_dtype)
    width = case.spec.hidden_size // case.grid.size("x")
    shape = (case.configuration.micro_batch, case.spec.seq_len, width)
    # The gradient goes on to the embedding, which is not a part of the stack.
    stream = torch.ones(shape, dtype=case.parameter_dtype, requires_grad=True)
    for _ in range(2):
        stack.zero_grad()
        with recorded(case.grid) as events:
            with overlapped(stack):
                with torch.autocast("cpu", torch.bfloat16, enabled=case.mixed):
                    loss = stack(stream).float().square().mean()
                if case.overlapped_backward:
                    loss.backward()
            if not case.overlapped_backward:
                loss.backward()
    return stack, events


def on_axonn_ranks(n_ranks, check, cases):
    """Call ``check(case)`` on each rank; cases of one grid stand next to each other."""
    on_ranks(n_ranks, on_axonn_rank, check, cases)


def on_axonn_rank(rank, check, cases):
    replace_cuda_calls()
    for _, alike in itertools.groupby(cases, key=lambda case: case.grid):
        first, *others = alike
        with groups_of(launched(first.prediction)):
            for case in (first, *others):
                check(case)


def check_events(case):
    wanted = engine_events(case.spec, case.job, case.configuration, axonn_facts(case))
    _, events = trained(case)
    for place, (expected, event) in enumerate(zip(wanted, events, strict=False)):
        assert event == expected, f"{case}, event {place}"
    assert len(events) == len(wanted), str(case)


def check_lists(case):
    """The weights that torch.cat joins are those that the engine says come as a list of shards."""
    with patch.object(torch, "cat", side_effect=torch.cat) as join:
        trained(case)
    program = load_engine("axonn" if case.overlapped_backward else "nanogpt").axonn
    chains = ["forward", "backward", *(["recompute"] * (case.configuration.recompute == "full"))]
    n_lists = sum(program.gathers_list(chain, case.job.overlap.oag) for chain in chains)
    n_weights = case.spec.n_layers * len(case.spec.block_linears)
    assert join.call_count == 2 * n_lists * n_weights, str(case)


def test_weights_that_are_not_gathered_ahead_come_as_lists():
    grid = grid_layout(1, 1, 2, 1)
    with_oag, without = Overlap(), Overlap(oag=False)
    cases = [
        Case(grid, with_oag),
        Case(grid, with_oag, recompute="full"),
        Case(grid, without, recompute="full"),
        Case(grid, with_oag, overlapped_backward=False, recompute="full"),
    ]
    on_axonn_ranks(2, check_lists, cases)


OPTIONS = [
    {},
    {"recompute": "full"},
    {"recompute": "full", "ahead_in_recompute": True},
    {"overlapped_backward": False},
    {"overlapped_backward": False, "recompute": "full"},
    {"keep_gathered_weights": True},
    {"keep_gathered_weights": True, "recompute": "full"},
    {"dtype": "bf16", "bias": True},
    {"dtype": "bf16", "mixed": True, "recompute": "full"},
]


def cases_of(n_ranks, n_for_each_grid):
    """Every grid, while all overlaps and options take turns; of 8 ranks those of three axes."""
    choices = itertools.cycle(itertools.product(OVERLAPS, OPTIONS))
    for grid in grids(n_ranks):
        if n_ranks == 8 and max(grid.sizes.values()) > 2:
            continue
        for overlap, options in itertools.islice(choices, n_for_each_grid):
            yield Case(grid, overlap, **options)


@pytest.mark.parametrize(
    ("n_ranks", "n_for_each_grid"),
    [
        (2, 2),
        pytest.param(4, 3, marks=pytest.mark.slow),
        pytest.param(8, 2, marks=pytest.mark.sweep),
    ],
)
def test_axonn_does_what_the_plan_says(n_ranks, n_for_each_grid):
    on_axonn_ranks(n_ranks, check_events, list(cases_of(n_ranks, n_for_each_grid)))


def check_reductions(case):
    from axonn.intra_layer import sync_gradients

    stack, _ = trained(case)
    with recorded(case.grid) as events:
        sync_gradients(stack, expert_mode=True)
    started, awaited = events[::2], events[1::2]
    assert [e._replace(action="await") for e in started] == awaited, "each call blocks"
    assert [e.axis for e in started] == sorted((e.axis for e in started), reverse=True)
    wanted = engine_reductions(case.spec, case.job, case.configuration, axonn_facts(case))
    for axis, expected in wanted.items():
        amounts = [e.amount for e in started if e.axis == axis]
        if case.grid.size(axis) > 1:
            assert (len(amounts), sum(amounts)) == expected, f"{case}, {axis}"


THREE_GRIDS = [grid_layout(2, 1, 2, 1), grid_layout(1, 2, 1, 2), grid_layout(1, 1, 2, 2)]


@pytest.mark.slow
def test_gradients_are_summed_one_parameter_at_a_time():
    options = [{}, {"dtype": "bf16", "bias": True}, {"dtype": "bf16", "mixed": True}]
    cases = [Case(grid, **each) for grid, each in itertools.product(THREE_GRIDS, options)]
    on_axonn_ranks(4, check_reductions, cases)


def check_vocabulary(case):
    """An embedding of torch and its norm are summed over Z one by one; AxoNN's own is split."""
    from axonn.intra_layer import embedding, sync_gradients

    sizes = case.grid.size("z") * SPEC.padded_vocab_size, SPEC.hidden_size
    model = torch.nn.ModuleList([torch.nn.Embedding(*sizes), torch.nn.LayerNorm(sizes[1])])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with recorded(case.grid) as events:
        sync_gradients(model, expert_mode=True)
    over_z = [event for event in events if event.axis == "z"]
    assert [event.action for event in over_z] == ["start", "await"] * 3, "each call blocks"
    assert [event.amount for event in over_z[::2]] == [4 * sizes[0] * sizes[1], *[4 * sizes[1]] * 2]
    strategy = Axonn4D(engine=load_engine("axonn-sc24"))
    plan = strategy.plan(SPEC, case.job, CandidateTable.single(case.configuration))
    (planned,) = (op for op in plan.step_end.phases[0].operations if "vocabulary" in op.name)
    assert planned.axis == "z" and float(planned.nbytes[0]) == over_z[0].amount
    on_cpu = partial(embedding.initialize_params, init_device="cpu")
    with patch.object(embedding, "initialize_params", on_cpu):
        own = embedding.Embedding(*sizes, expert_mode=True).weight
    assert own.numel() == sizes[0] * sizes[1] / case.grid.size("z")
    assert not load_engine("axonn").axonn.replicates_vocabulary


def test_what_axonn_does_not_split_is_summed_over_z_in_blocking_calls():
    on_axonn_ranks(2, check_vocabulary, [Case(grid_layout(1, 1, 2, 1))])


def check_gradients(case):
    overlapped, _ = trained(case)
    in_turn, _ = trained(replace(case, overlap=Overlap(False, False, False)))
    for own, other in zip(overlapped.parameters(), in_turn.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.slow
def test_axonn_waits_for_what_it_overlaps():
    """If the adapter for CPUs forgot to wait for a collective, gradients would differ."""
    cases = [Case(grid, recompute=each) for grid in THREE_GRIDS for each in ("none", "full")]
    on_axonn_ranks(4, check_gradients, cases)


AS_PLANNED = EngineFacts(
    late_gathers=(),
    overlaps_backward=True,
    scatters_awaited_at_end=False,
    weight_gradient_first=False,
    gathered_bytes=4.0,
    gradient_bytes=4.0,
    biases_summed_over_z=True,
)


@pytest.mark.parametrize(
    "fact",
    [
        {"late_gathers": ("backward",)},
        {"late_gathers": ("recompute.qkv",)},
        {"overlaps_backward": False},
        {"scatters_awaited_at_end": True},
        {"weight_gradient_first": True},
        {"gathered_bytes": 8.0},
    ],
)
def test_each_fact_changes_the_expected_events(fact):
    case = Case(grid_layout(2, 1, 2, 1), recompute="full")
    world = (case.spec, case.job, case.configuration)
    plain = engine_events(*world, AS_PLANNED)
    changed = engine_events(*world, replace(AS_PLANNED, **fact))
    assert plain == [each.event for each in planned_events(*world)] and changed != plain
    if "gathered_bytes" not in fact:
        assert sorted(changed) == sorted(plain)

"""Models, and the cases (a grid and how to train on it) in which the runtime is checked."""

import itertools
from dataclasses import dataclass, field, replace

from runtime.ranks import Trained, grids
from worlds import llama

from axonn_tune.spec.job import Overlap
from axonn_tune.spec.layout import Layout, grid_layout
from axonn_tune.spec.model import RECOMPUTES, Model

GPT = Model("gpt", n_layers=2, hidden_size=32, n_heads=8, vocab_size=250, seq_len=8)
LLAMA = llama(
    n_layers=2,
    hidden_size=32,
    n_heads=8,
    n_kv_heads=4,
    ffn_hidden_size=48,
    vocab_size=200,
    seq_len=8,
)
MODELS = {
    "gpt": GPT,
    "llama": LLAMA,
    "parallel": replace(GPT, parallel_block=True, position="rotary"),
    "deep": replace(GPT, n_layers=3),
    "bare": replace(
        GPT, position="none", bias=False, qkv_bias=True, proj_bias=False, tied_embeddings=False
    ),
}
BATCH = 16

ALL_ON, ALL_OFF = Overlap(), Overlap(False, False, False)
OVERLAPS = (
    ALL_ON,
    ALL_OFF,
    replace(ALL_ON, grad_reduce=True),
    *(replace(ALL_ON, **{name: False}) for name in ("oar", "ors", "oag")),
    replace(ALL_OFF, grad_reduce=True),
)
OPTIONS = [
    {},
    {"model": "llama"},
    {"keep_gathered_weights": True},
    {"order": "dzyx", "attention": "unfused"},
    {"model": "bare", "kernel_tuning": True},
    {"n_microsteps": 2},
    {"model": "parallel", "order": "zxyd"},
]


@dataclass(frozen=True)
class Case:
    grid: Layout
    model: str = "gpt"
    order: str = "xyzd"
    overlap: Overlap = field(default_factory=Overlap)
    recompute: str = "none"
    attention: str = "flash"
    keep_gathered_weights: bool = False
    kernel_tuning: bool = False
    n_microsteps: int = 1
    dtype: str = "fp32"

    @property
    def spec(self):
        return MODELS[self.model]

    @property
    def micro_batch(self):
        return BATCH // (self.grid.size("z") * self.grid.size("data") * self.n_microsteps)


def telling_cases(n_ranks):
    """Every grid, while all overlaps, recomputations and other options take turns."""
    turns = itertools.cycle(
        [
            Case(grid_layout(1, 1, 1, 1), overlap=overlap, recompute=recompute, **options)
            for (overlap, recompute), options in zip(
                itertools.product(OVERLAPS, RECOMPUTES), itertools.cycle(OPTIONS)
            )
        ]
    )
    for grid in grids(n_ranks):
        for case in itertools.islice(turns, 4 if n_ranks < 8 else 1):
            is_legal = case.spec.n_kv_heads % grid.size("y") == 0
            yield replace(case, grid=grid, model=case.model if is_legal else "gpt")


def reducing_cases(n_ranks):
    """Grids with two replicas, whose last backward pass reduces gradients over them."""
    all_on, only = (replace(each, grad_reduce=True) for each in (ALL_ON, ALL_OFF))
    wanted = [grid for grid in grids(n_ranks) if grid.size("data") == 2 and grid.size("x") == 1]
    options = (
        {"model": "bare", "overlap": all_on, "n_microsteps": 2, "dtype": "bf16"},
        {"model": "deep", "overlap": only, "recompute": "full"},
    )
    return [Case(grid, **each) for grid in wanted for each in options]


def all_cases(n_ranks):
    """Every overlap with every recomputation on the grids whose axes have one or two ranks.

    Other grids differ by the size of an axis only from one of these with fewer ranks.
    """
    wanted = [grid for grid in grids(n_ranks) if max(grid.sizes.values()) == 2]
    for grid, overlap, recompute in itertools.product(wanted, OVERLAPS, RECOMPUTES):
        yield Case(grid, overlap=overlap, recompute=recompute)


def trained(case, mesh):
    """The case's model with its optimizer on a mesh."""
    return Trained(
        case.spec,
        mesh,
        model={"attention": case.attention, "recompute": case.recompute},
        optimizer={"one_microstep": case.n_microsteps == 1},
        dtype=case.dtype,
        overlap=case.overlap,
        keep_gathered_weights=case.keep_gathered_weights,
        kernel_tuning=case.kernel_tuning,
        record=True,
    )

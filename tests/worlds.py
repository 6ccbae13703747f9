"""Machines from plain numbers; random models, machines, jobs and candidates for hypothesis."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.engine import IDEAL, Engine
from axonn_tune.spec.gpu import GemmRates, Gpu, KernelRates, Tile
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import AXES, ORDERS, grid_layout
from axonn_tune.spec.links import LinkLevel, RingBandwidth
from axonn_tune.spec.machine import Host, Machine, MemoryReserve
from axonn_tune.spec.model import RECOMPUTES, Model
from axonn_tune.spec.programs import MegatronProgram, ZeroProgram
from axonn_tune.spec.quantity import Quantity


def llama(**sizes):
    """A Llama of the given sizes: a gated MLP, RMS norms, rotary positions, no biases, no ties."""
    flags = {"gated_mlp": True, "norm": "rms", "position": "rotary"}
    return Model("llama", **{**flags, "bias": False, "tied_embeddings": False, **sizes})


# The model of eight billion parameters that nanotron's published runs trained.
NANOTRON_8B = llama(
    n_layers=32,
    hidden_size=4096,
    n_heads=32,
    n_kv_heads=32,
    ffn_hidden_size=14336,
    vocab_size=131072,
    seq_len=4096,
)
# An engine whose buckets are smaller than any matrix, so that no bucket holds all gradients.
SMALL_BUCKETS = replace(
    IDEAL, megatron=MegatronProgram(bucket_elements=1000.0, bucket_elements_per_replica=0.0)
)
# The sizes of `small_llama`, from which tests count by hand.
HIDDEN, FFN, SEQ, VOCAB = 512, 1024, 128, 1024


def small_llama(n_layers):
    """A Llama with eight heads and four of keys and values."""
    return llama(
        n_layers=n_layers,
        hidden_size=HIDDEN,
        n_heads=8,
        n_kv_heads=4,
        ffn_hidden_size=FFN,
        vocab_size=VOCAB,
        seq_len=SEQ,
    )


def by_matrix(**facts):
    """An engine that gathers each matrix on its own, as DeepSpeed does, with more facts of ZeRO."""
    return Engine(zero=ZeroProgram(gathers_blocks=False, **facts))


BY_MATRIX = by_matrix()


def quantity(value):
    """A number without a story."""
    return Quantity(value, "assumed", "test")


def machine_of(
    units=(1, 4),
    bandwidths=(300e9, 80e9),
    latencies=(3e-6, 1e-5),
    rings=(),
    jitter=0.0,
    slowdown=0.0,
    peak=300e12,
    memory_bandwidth=1.5e12,
    modes=(1.0, 1.0, 1.0),
    ranks_per_node=4,
    points=(),
):
    """A machine from plain numbers; `rings` are (stride, size, bytes per second)."""
    return Machine(
        name="test",
        gpu=Gpu(
            "gpu",
            100,
            quantity(40e9),
            quantity(memory_bandwidth),
            {dtype: quantity(peak) for dtype in ("bf16", "fp16", "fp32")},
        ),
        ranks_per_node=ranks_per_node,
        gemm=GemmRates(
            quantity(0.8),
            quantity(100.0),
            (Tile(256, 128, 1.0), Tile(64, 64, 0.5)),
            dict(zip(("NN", "NT", "TN"), map(quantity, modes), strict=True)),
            tuple(points),
        ),
        kernels=KernelRates(
            quantity(0.5), quantity(0.4), quantity(0.8), quantity(5e-6), quantity(slowdown)
        ),
        links=tuple(
            LinkLevel(f"level{i}", unit, quantity(bandwidth), quantity(latency))
            for i, (unit, bandwidth, latency) in enumerate(
                zip(units, bandwidths, latencies, strict=True)
            )
        ),
        memory_reserve=MemoryReserve(quantity(1e9), quantity(0.05)),
        jitter_fraction=quantity(jitter),
        ring_bandwidths=tuple(RingBandwidth(s, g, quantity(b)) for s, g, b in rings),
    )


def with_host(machine, link=25e9, memory=256e9, bandwidth=200e9, fraction=0.5):
    """A machine whose nodes have a host of these plain numbers."""
    host = Host(quantity(link), quantity(memory), quantity(bandwidth), quantity(fraction))
    return replace(machine, host=host)


@st.composite
def machines(draw):
    """Machines of one to four link levels, with and without listed rings."""
    n_levels = draw(st.integers(1, 4))
    units = [1]
    for _ in range(n_levels - 1):
        units.append(units[-1] * draw(st.sampled_from([2, 3, 4])))
    rates = st.floats(1e9, 1e12)
    node = draw(st.sampled_from([unit for unit in units if unit > 1] or [1]))
    rings = draw(
        st.lists(
            st.tuples(st.sampled_from([1, 2]), st.sampled_from([2, 4]), rates),
            max_size=3,
            unique_by=lambda ring: ring[:2],
        )
    )
    return machine_of(
        units=units,
        bandwidths=[draw(rates) for _ in units],
        latencies=[draw(st.sampled_from([0.0, 1e-6, 1e-5, 1e-4])) for _ in units],
        rings=rings,
        jitter=draw(st.sampled_from([0.0, 0.03])),
        slowdown=draw(st.sampled_from([0.0, 0.19, 0.9])),
        peak=draw(st.floats(1e13, 1e15)),
        memory_bandwidth=draw(st.floats(1e11, 1e13)),
        modes=[draw(st.floats(0.1, 1.0)) for _ in range(3)],
        ranks_per_node=node,
    )


@st.composite
def models(draw):
    """Small transformers of every kind that many grids divide."""
    heads = draw(st.sampled_from([4, 8, 12]))
    return Model(
        name="random",
        n_layers=draw(st.sampled_from([1, 2, 3, 9, 40])),
        hidden_size=heads * draw(st.sampled_from([64, 128])),
        n_heads=heads,
        n_kv_heads=heads // draw(st.sampled_from([1, 2, 4])),
        vocab_size=draw(st.sampled_from([1000, 32000])),
        seq_len=256,
        gated_mlp=draw(st.booleans()),
        norm=draw(st.sampled_from(["layer", "rms"])),
        position=draw(st.sampled_from(["learned", "rotary", "none"])),
        bias=draw(st.booleans()),
        qkv_bias=draw(st.sampled_from([None, True, False])),
        proj_bias=draw(st.sampled_from([None, True, False])),
        tied_embeddings=draw(st.booleans()),
    )


GRID_SIZES = st.sampled_from([1, 1, 2, 3, 4])


@st.composite
def worlds(draw):
    """Model, job, machine, recomputation and a table of a few legal candidates."""
    model, machine = draw(models()), draw(machines())
    chosen = st.builds(grid_layout, GRID_SIZES, st.sampled_from([1, 2]), GRID_SIZES, GRID_SIZES)
    grid = draw(
        chosen.filter(
            lambda g: model.hidden_size % g.size("x") == 0 and model.n_kv_heads % g.size("y") == 0
        )
    )
    x, size_y, z, data = (grid.size(axis) for axis in AXES)
    # Grids of the same number of ranks: the axes of the first one change places.
    sizes = {
        (size_x, size_y, size_z, size_data)
        for size_x, size_z, size_data in (
            (x, z, data),
            (x, data, z),
            (x, z * data, 1),
            (1, z * x, data),
        )
    }
    orders = draw(st.sampled_from([("xyzd",), ("zyxd", "dxyz"), ORDERS]))
    placements = Placements.of([grid_layout(*each) for each in sorted(sizes)], orders)
    rows = draw(st.lists(st.integers(0, len(placements) - 1), min_size=1, max_size=6))
    batch = 4 * z * data * x
    micro_batches = [draw(st.sampled_from([1, 2, 4])) for _ in rows]
    table = CandidateTable(placements, np.array(rows), np.array(micro_batches))
    overlap = Overlap(draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))
    job = Job(
        n_gpus=grid.n_ranks,
        global_batch=batch,
        seq_len=256,
        dtype=draw(st.sampled_from(["bf16", "fp32"])),
        attention=draw(st.sampled_from(["flash", "unfused"])),
        overlap=overlap,
        kernel_tuning=draw(st.booleans()),
        keep_gathered_weights=draw(st.booleans()),
    )
    return model, job, machine, draw(st.sampled_from(RECOMPUTES)), table

"""Messages of a tensor group that travel beside the products which take or form them."""

from collections import Counter
from dataclasses import replace

import pytest
from build import number, operations, plan_of
from worlds import machine_of

from axonn_tune.errors import InputError
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Collective, Gemm, MemoryBound
from axonn_tune.spec.programs import MegatronProgram
from axonn_tune.spec.scenario import Scenario
from axonn_tune.spec.tuning import Adapters
from axonn_tune.step.predict import predict
from axonn_tune.strategies.megatron.megatron3d import Megatron3D

MODEL = Model("m", n_layers=4, hidden_size=2048, n_heads=16, vocab_size=1024, seq_len=1024)
JOB = Job(8, 8, 1024)
SIZES = {"tensor": 4, "data": 2}
USUAL = Megatron3D()
BESIDE = replace(USUAL, overlaps_tensor=True)


def kernels_and_messages(strategy, job=JOB):
    ops = operations(plan_of(strategy, MODEL, job, **SIZES).microstep)
    sent = Counter()
    for op in ops:
        if isinstance(op, Collective) and op.axis == "tensor":
            sent[op.name.replace(".last_part", "")] += number(op.nbytes)
    waiting = {op.name for op in ops if isinstance(op, Gemm) and op.waits_for}
    return ops, sent, waiting


def test_as_much_is_sent_and_products_do_not_wait_for_it():
    _, sent, waiting = kernels_and_messages(USUAL)
    _, sent_beside, waiting_beside = kernels_and_messages(BESIDE)
    assert sent_beside == pytest.approx(sent)
    assert {"forward.up.gemm", "backward.down.gemm_input"} <= waiting
    assert not {"forward.up.gemm", "backward.down.gemm_input"} & waiting_beside


def test_all_but_the_part_of_one_rank_is_summed_while_the_product_runs():
    ops, _, _ = kernels_and_messages(BESIDE)
    names = [op.name for op in ops]
    product = names.index("forward.down.gemm")
    first, last = (ops[i] for i in (product - 1, product + 1))
    assert first.name == "forward.down.reduce_scatter"
    assert last.name == "forward.down.last_part.reduce_scatter"
    assert number(first.nbytes) == pytest.approx(3.0 * number(last.nbytes))


def test_messages_of_one_name_are_alike():
    """They are priced once, so that each part of a sum has to have a name of its own."""
    nbytes = {}
    for op in kernels_and_messages(BESIDE)[0]:
        if isinstance(op, Collective):
            assert nbytes.setdefault((op.name, op.axis), number(op.nbytes)) == number(op.nbytes)


def test_what_was_exposed_is_hidden_and_nothing_is_without_sequence_parallelism():
    configuration = Configuration(Layout({**SIZES, "context": 1, "pipeline": 1}))

    def step(strategy):
        return predict(Scenario(MODEL, JOB, machine_of(), strategy), configuration).step_seconds

    assert step(BESIDE) < 0.98 * step(USUAL)
    whole = replace(USUAL, sequence_parallel=False)
    assert step(replace(whole, overlaps_tensor=True)) == step(whole)


def test_a_product_beside_an_adapter_waits_for_all_tokens():
    """The adapter reads them, too; other products begin with the first of them."""
    job = replace(JOB, adapters=Adapters(16, ("qkv",)))
    _, sent, waiting = kernels_and_messages(BESIDE, job)
    assert sent == pytest.approx(kernels_and_messages(USUAL, job)[1])
    assert "forward.qkv.gemm" in waiting
    assert not {"forward.up.gemm", "forward.down.gemm"} & waiting
    assert "forward.qkv.gemm" not in kernels_and_messages(BESIDE)[2]


def test_a_rank_copies_its_part_of_what_travels_beside_a_product():
    """A copy reads and writes; what is gathered for dW is copied beside other products."""

    def copied(strategy, job=JOB):
        return {
            op.name: number(op.nbytes)
            for op in kernels_and_messages(strategy, job)[0]
            if isinstance(op, MemoryBound) and op.name.endswith(".shard")
        }

    own = 2 * 1024 / 4 * 2048 * 2.0
    beside = ("forward.qkv", "forward.up", "backward.proj", "backward.down")
    assert copied(BESIDE) == {f"{owner}.all_gather.shard": own for owner in beside}
    assert not copied(USUAL)
    adapted = replace(JOB, adapters=Adapters(16, ("qkv",)))
    assert "forward.qkv.all_gather.shard" not in copied(BESIDE, adapted)


def test_outputs_may_be_summed_in_8_bits():
    """Layers that the engine names sum them so in the forward pass, where products are low."""
    low = replace(BESIDE, engine=Engine(megatron=MegatronProgram(low_sums=("down",))))
    job = replace(JOB, precision="fp8-delayed")

    def sent(strategy, job):
        return kernels_and_messages(strategy, job)[1]

    usual, found = sent(BESIDE, job), sent(low, job)
    assert found.pop("forward.down.reduce_scatter") == usual.pop("forward.down.reduce_scatter") / 2
    assert found == usual
    assert sent(low, JOB) == sent(BESIDE, JOB)


def test_a_layer_whose_output_is_not_summed_is_refused():
    with pytest.raises(InputError, match="low_sums is 'up'; allowed: proj, down"):
        MegatronProgram(low_sums=("up",))

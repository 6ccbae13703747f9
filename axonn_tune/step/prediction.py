"""The prediction of one configuration in a scenario."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.engine import HELD_BACK
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.normal import NORMAL_90
from axonn_tune.spec.recomputation import (
    is_partial,
    n_recomputed_layers,
    recomputed_modules,
    runs_attention_again,
)
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.memory import memory_interval_bytes


@dataclass(frozen=True)
class Prediction:
    """One configuration with its predicted step.

    scenario, configuration
        What was predicted.
    n_microsteps
        Number of micro-steps of a training step (gradient accumulation).
    step_seconds
        Time of a training step.
    exposed_communication_seconds
        Time in which the compute stream stands still for a collective.
    bubble_seconds
        Time in which a rank of the last stage waits for its pipeline.
    memory_terms_bytes, memory_bytes
        Peak memory of one rank, by term and in all.
    host_memory_bytes
        Bytes of the host's memory that the ranks of a node take.
    runs_ahead
        Whether the host of a stage is known to run ahead of its GPU (`Evaluator.runs_ahead`).
    paper_communication_seconds
        Communication time by AxoNN's own equations; None for layouts that are no grids.
    place
        Place in the ranking from which the prediction comes, the best being 1.
    spread_fraction
        Standard deviation of the logarithm of the step time.
    p_best
        Probability that no other candidate is faster.

    The last two are known only of the fastest rows of a ranking.
    """

    scenario: Scenario
    configuration: Configuration
    n_microsteps: int
    step_seconds: float
    exposed_communication_seconds: float
    bubble_seconds: float
    memory_terms_bytes: Mapping[str, float]
    memory_bytes: float
    host_memory_bytes: float
    runs_ahead: bool
    paper_communication_seconds: float | None
    place: int = 1
    spread_fraction: float | None = None
    p_best: float | None = None

    def __hash__(self) -> int:
        return hash((self.configuration, self.step_seconds, self.memory_bytes))

    @property
    def layout(self) -> Layout:
        """The layout of the configuration."""
        return self.configuration.layout

    @property
    def compute_seconds(self) -> float:
        """The time in which the rank computes."""
        return self.step_seconds - self.exposed_communication_seconds - self.bubble_seconds

    @property
    def step_seconds_interval(self) -> tuple[float, float] | None:
        """The ends of the interval that holds the step time with 90 % probability."""
        if self.spread_fraction is None:
            return None
        factor = math.exp(NORMAL_90 * self.spread_fraction)
        return self.step_seconds / factor, self.step_seconds * factor

    @property
    def exposed_communication_fraction(self) -> float:
        """The share of the step in which the compute stream stands still for collectives."""
        return self.exposed_communication_seconds / self.step_seconds

    @property
    def tflops_per_gpu(self) -> float:
        """The TFLOP/s of each GPU, by the model's FLOPs."""
        return self.scenario.model_flops * self._tflops_per_flop

    @property
    def causal_tflops_per_gpu(self) -> float:
        """The TFLOP/s of each GPU, by the model's FLOPs with the causal half of scores alone."""
        return self.scenario.causal_flops * self._tflops_per_flop

    @property
    def hardware_tflops_per_gpu(self) -> float:
        """The TFLOP/s of each GPU, by the FLOPs of the model and of recomputation."""
        n_chunks = self.layout.n_stages * self.configuration.n_virtual
        flops = hardware_flops(self.scenario, self.configuration.recompute, n_chunks)
        return flops * self._tflops_per_flop

    @property
    def _tflops_per_flop(self) -> float:
        """The TFLOP/s of each GPU for every FLOP of the step."""
        return 1e-12 / (self.step_seconds * self.scenario.job.n_gpus)

    @property
    def mfu(self) -> float:
        """The model's FLOP/s as a fraction of the advertised peak."""
        return self.tflops_per_gpu / self._peak_tflops

    @property
    def hfu(self) -> float:
        """The FLOP/s including recomputation as a fraction of the advertised peak."""
        return self.hardware_tflops_per_gpu / self._peak_tflops

    @property
    def _peak_tflops(self) -> float:
        """The advertised peak of the GPU, in TFLOP/s."""
        return self.scenario.machine.peak_flops_per_s(self.scenario.job.dtype) * 1e-12

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """The number of tokens on which each GPU trains in a second."""
        job = self.scenario.job
        return job.tokens / (self.step_seconds * job.n_gpus)

    @property
    def seconds_per_token(self) -> float:
        """The time of a step over its tokens, by which steps of different batches compare."""
        return self.step_seconds / self.scenario.job.tokens

    @property
    def allocated_bytes(self) -> float:
        """The peak memory of all tensors, without what only the allocator holds or is reserved."""
        return self.allocator_bytes - self.memory_terms_bytes["fragmentation"] - self._held_back

    @property
    def allocator_bytes(self) -> float:
        """The peak memory that the framework's allocator holds, without what is reserved."""
        return self.memory_bytes - self.memory_terms_bytes["reserved"]

    @property
    def memory_capacity_bytes(self) -> float:
        """The memory of one GPU that a rank may take."""
        return self.scenario.memory_capacity_bytes

    @property
    def host_memory_capacity_bytes(self) -> float:
        """The memory of a node's host; infinite where nothing is offloaded."""
        return self.scenario.host_memory_capacity_bytes

    @property
    def fits_in_host(self) -> bool:
        """Whether what the ranks of a node offload fits in its host's memory."""
        return self.host_memory_bytes <= self.host_memory_capacity_bytes

    @property
    def fits_in_gpu(self) -> bool:
        """Whether the peak memory of a rank fits in its GPU."""
        return self.memory_bytes <= self.memory_capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak memory of a rank fits in its GPU, and what is offloaded in the host."""
        return self.fits_in_gpu and self.fits_in_host

    @property
    def memory_bytes_interval(self) -> tuple[float, float]:
        """The ends of the interval that holds the peak memory with 90 % probability."""
        return memory_interval_bytes(self.scenario, self.memory_bytes, self.memory_terms_bytes)

    @property
    def nearly_fits(self) -> bool:
        """Whether it does not fit, but may: the interval of the peak memory begins below."""
        may_fit = self.memory_bytes_interval[0] <= self.memory_capacity_bytes
        return not self.fits and self.fits_in_host and may_fit

    @property
    def fits_tightly(self) -> bool:
        """Whether it fits, but may not: the interval of the peak memory ends above."""
        most_needed = self.memory_bytes_interval[1] - self._held_back
        return self.fits and most_needed > self.memory_capacity_bytes

    @property
    def _held_back(self) -> float:
        """The bytes that the allocator holds back as long as nothing else needs them."""
        return self.memory_terms_bytes.get(HELD_BACK, 0.0)

    @property
    def largest_memory_term(self) -> str:
        """The term that takes most memory."""
        return max(self.memory_terms_bytes, key=lambda term: self.memory_terms_bytes[term])


def hardware_flops(scenario: Scenario, recompute: str, n_chunks: int = 1) -> float:
    """Return the FLOPs of a training step, including what its engine computes again.

    Parameters
    ----------
    n_chunks
        Number of parts into which a pipeline cuts the layers.
    """
    model, job, engine = scenario.model, scenario.job, scenario.strategy.engine
    modules = recomputed_modules(recompute)
    again = runs_attention_again(recompute, job.attention, engine.megatron.reruns_attention)
    if again and not engine.zero.recomputes_products:
        modules = frozenset(("core_attn",))
    if modules:
        return scenario.model_flops + model.recomputed_module_flops(
            job.tokens, job.sample_len, modules, job.frozen, job.mtp_modules
        )
    share = 1.0
    if is_partial(recompute):
        of_chunk = math.ceil(model.n_layers / n_chunks)
        share = n_recomputed_layers(recompute, of_chunk) / of_chunk
        recompute = "full"
    flops = model.hardware_flops(
        job.tokens,
        job.sample_len,
        recompute,
        share,
        job.adapters,
        job.mtp_modules,
        job.frozen,
    )
    if recompute == "selective" and engine.zero.recomputes_products:
        flops += model.recomputed_product_flops(job.tokens, engine.zero.joins_queries)
    if recompute == "full" and engine.leaves_out_last_product(model, job):
        flops -= share * model.last_product_flops(job.tokens, job.frozen)
    return flops

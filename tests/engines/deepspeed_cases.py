"""Models and settings with which DeepSpeed trains on CPUs."""

from dataclasses import dataclass, replace

from build import memory_terms, plan_of

from axonn_tune.io.presets import load_engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.strategies.zero.zero import zero3

GPT = Model(
    "gpt", 10, 32, n_heads=4, vocab_size=256, seq_len=16, position="none", tied_embeddings=False
)
LLAMA = replace(
    GPT, ffn_hidden_size=80, gated_mlp=True, norm="rms", bias=False, qkv_bias=False, proj_bias=False
)
WIDE = replace(GPT, hidden_size=96, ffn_hidden_size=384)
# Matrices have at least 1,024 elements, vectors at most 384.
VECTOR_ELEMENTS = 500
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Case:
    """How DeepSpeed trains a model.

    `live` and `bucket` are the elements that a rank may hold gathered and may reduce at once, in
    blocks of the model; with a bucket of 0 every matrix is reduced alone. Up to `prefetched`
    elements, matrices join a gather; by default this is less than any matrix has.
    `activation_is_module` says so of the MLP's activation.
    """

    spec: Model
    live: float
    bucket: float
    recompute: str = "full"
    n_microsteps: int = 1
    prefetched: int = VECTOR_ELEMENTS
    activation_is_module: bool = False

    @property
    def live_elements(self):
        return self.spec.head.parameters + self.live * self.spec.block_matmul_parameters

    @property
    def keeps_blocks(self):
        """Whether a rank may hold several blocks, so that it gathers several matrices ahead."""
        return self.live > 1

    @property
    def bucket_elements(self):
        return self.bucket * self.spec.block_matmul_parameters or VECTOR_ELEMENTS

    @property
    def zero_settings(self):
        return {
            "stage3_max_live_parameters": int(self.live_elements),
            "stage3_max_reuse_distance": int(self.live_elements),
            "stage3_prefetch_bucket_size": self.prefetched,
            "stage3_param_persistence_threshold": VECTOR_ELEMENTS,
            "reduce_bucket_size": int(self.bucket_elements),
        }

    def strategy(self, **facts):
        engine = load_engine("deepspeed")
        program = replace(
            engine.zero,
            prefetch_elements=self.prefetched,
            live_elements=self.live_elements,
            reuse_elements=self.live_elements,
            bucket_elements=self.bucket_elements,
            activation_is_module=self.activation_is_module,
            **facts,
        )
        return zero3(replace(engine, zero=program))

    def job(self, n_ranks):
        return Job(n_ranks, n_ranks * self.n_microsteps, self.spec.seq_len, dtype="bf16")

    def plan(self, n_ranks, **facts):
        job = self.job(n_ranks)
        return plan_of(self.strategy(**facts), self.spec, job, 1, self.recompute, shard=n_ranks)

    def memory(self, n_ranks):
        """The bytes that a rank holds, by term."""
        job = self.job(n_ranks)
        return memory_terms(self.strategy(), self.spec, job, 1, self.recompute, shard=n_ranks)

"""The interface between a transformer's kernels and a strategy: what is sent, and when.

`Transformer` emits the kernels of a micro-step. At every point where a strategy may have to
bring something, sum something or wait, it calls a method of `Communication`. A strategy is a
subclass that overrides some of these methods and nothing else; the list below is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from axonn_tune.spec import names
from axonn_tune.spec.job import Overlap
from axonn_tune.spec.plan import NO_HANDOVER, Array, Size
from axonn_tune.strategies.attention import whole_attention
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import Shapes


class Weight(NamedTuple):
    """One use of a layer's weight, in the forward, the recomputed or the backward chain."""

    chain: str
    layer: str

    @property
    def name(self) -> str:
        """The name of the layer within the chain, with which names of operations begin."""
        return names.of_layer(self.chain, self.layer)


@dataclass(frozen=True, eq=False)
class Communication:
    """Issues the collectives of one kind of micro-step, and waits for them.

    The defaults suit a strategy whose weights are never gathered, whose partial sums are
    all-reduced over the axes of `shapes`, and whose gradients stay where they are formed until
    the end of the step.

    A method that receives a host program issues into it (collectives, and kernels that pack or
    unpack messages) and waits in it, which holds up the next kernel.

    Attributes
    ----------
    shapes : Shapes
        Sizes of everything that the rank computes.
    sync : bool
        Whether this is the one micro-step of a step during which updated weights are gathered and
        gradients are reduced over replicas.
    """

    shapes: Shapes
    sync: bool

    # Weights -----------------------------------------------------------------------------

    @property
    def keeps_weights(self) -> bool:
        """Whether weights stay with the rank, which then casts them once, after each update.

        Weights that do not stay are cast whenever they have been gathered.
        """
        return True

    def share_transposed(self, chain: str) -> Size | None:
        """Return the share of a chain's passes that transpose what was gathered in a low format.

        None where weights are gathered in the job's type, and cast. Called after `take_weight`
        where weights do not stay with the rank.
        """
        return None

    def prefetch_weight(self, host: HostProgram, weight: Weight) -> None:
        """Start to gather the first weight of a pass; nothing has been issued before it.

        Called before the embedding and, in a pipeline, at the start of a stage's pass.
        """

    def take_weight(self, host: HostProgram, weight: Weight, following: Weight | None) -> None:
        """Wait until the weight is gathered, and start to gather the one that is used next.

        Called right before the kernels that use the weight: the embedding's lookup, and the
        products of a linear layer. `following` is None where nothing follows in this pass.
        """

    def begin_block(self, host: HostProgram, chain: str) -> None:
        """Wait for what all layers of a block share.

        Called before the first kernel of each block of a chain. With full recomputation the
        backward chain of a block continues its recomputed chain, and there is no call for it.
        """

    def prefetch_root(self, host: HostProgram, chain: str) -> None:
        """Start to gather the end of the model that comes next; called in the last block.

        This is the head in the forward chain, and the embedding in the others.
        """

    def prefetch_block(self, host: HostProgram, chain: str) -> None:
        """Start to gather the weights of the next block of a chain.

        Called in every block that another one follows, once the first kernels of the block have
        been issued; before the first block of the forward pass in the embedding, and before the
        first block of the backward pass in the head.
        """

    def prefetch_beside_head(self, host: HostProgram, chain: str) -> None:
        """Start to gather the first block of a chain.

        Called in the head, right before its gradients are formed.
        """
        self.prefetch_block(host, chain)

    def end_head(self, host: HostProgram, chain: str) -> None:
        """Bring what the final norm's gradient needs; `chain` is the one that comes next.

        Called right after the head's gradients have been formed.
        """

    @property
    def backward_overlap(self) -> Overlap:
        """The overlaps that hold for the backward pass, and for what recomputation repeats."""
        return self.shapes.job.overlap

    # Forward pass of a layer -----------------------------------------------------------------

    @property
    def norm_axis(self) -> str:
        """The axis whose ranks add the sums of a norm over their features; empty for none."""
        return self.shapes.x_axis

    @property
    def sum_kind(self) -> str:
        """The kind of collective that turns partial sums into what the next kernel reads."""
        return "all_reduce"

    def gather_input(self, host: HostProgram, weight: Weight) -> None:
        """Gather the input of a product, and wait for it.

        Called between `take_weight` and the product of the forward or the recomputed chain.
        """

    def sum_output(self, host: HostProgram, weight: Weight) -> None:
        """Sum the output over the axis that splits k, and wait for it.

        Called after the product of the forward or the recomputed chain.
        """
        shape = self.shapes.linears[weight.layer]
        name = names.collective(weight.name, self.sum_kind)
        host.run(name, self.sum_kind, shape.output_bytes, shape.input_axis)

    @property
    def sums_embedding(self) -> bool:
        """Whether rows of the embedding are summed over ranks that hold different ones."""
        return bool(self.shapes.y_axis)

    @property
    def embedding_sum(self) -> str:
        """The name of the collective that sums the embedding's rows over the axis that splits n."""
        return names.all_reduce(Weight(names.FORWARD, "embedding").name)

    # Attention ---------------------------------------------------------------------------------

    def attend(self, host: HostProgram, chain: str, window: int) -> None:
        """Run attention in a chain, with what is sent for it; sequences are whole by default.

        Called in each chain with the window of the block, 0 for none, and where selective
        recomputation repeats unfused attention.
        """
        whole_attention(host, self.shapes, chain, window)

    # Experts -----------------------------------------------------------------------------------

    def send_to_experts(self, host: HostProgram, chain: str, message: str, nbytes: Array) -> None:
        """Send copies of tokens, or gradients of results, to the ranks of their experts, and wait.

        Called in each chain with the name of the message and the bytes that a rank sends. Without a
        group of experts every rank holds all.
        """

    def bring_from_experts(
        self, host: HostProgram, chain: str, message: str, nbytes: Array
    ) -> None:
        """Send results, or gradients of copies, back from the ranks of the experts, and wait.

        Called in each chain with the name of the message and the bytes that a rank receives.
        """

    @property
    def sends_probabilities(self) -> bool:
        """Whether the router's probabilities travel with the copies to the experts."""
        return False

    @property
    def pairs_micro_batches(self) -> bool:
        """Whether exchanges of experts run beside the computation of another micro-batch."""
        return False

    @property
    def combined_issues(self) -> float:
        """The number of operations that the host issues in a layer to pair it with another one."""
        return 0.0

    @property
    def delays_expert_gradients(self) -> bool:
        """Whether the gradients of experts' weights are formed while those of tokens travel."""
        return False

    @property
    def sorts_all_copies(self) -> bool:
        """Whether copies are sorted by their experts where a rank holds all of these, too."""
        return False

    @property
    def pads_experts(self) -> bool:
        """Whether kernels of their own pad the rows of each expert for low products."""
        return False

    def gather_counts(self, host: HostProgram, name: str, nbytes: Size) -> None:
        """Tell all ranks that hold experts how many copies come for each expert, and wait.

        Called with the bytes of one rank's numbers.
        """

    # Backward pass of a layer ------------------------------------------------------------------

    def gather_for_gradients(self, host: HostProgram, weight: Weight) -> None:
        """Gather the gradient of the output, and start to gather the input for dW.

        Called between `take_weight` and the product that forms dI.
        """

    def gather_embedding_gradient(self, host: HostProgram) -> None:
        """Gather the gradients of the embedding's rows where each rank has some of the tokens.

        Called in the backward pass of the embedding.
        """

    def n_gradient_sums(self, layer: str) -> int:
        """Return how many sums over ranks form the gradient of a layer's input.

        Called when they start.
        """
        return 1

    def sum_input_gradient(self, host: HostProgram, weight: Weight) -> str:
        """Start to sum dI over the axis that splits n; without OAR, wait for it.

        Called between the products that form dI and dW.

        Returns
        -------
        str
            Name of the collective that the transformer awaits once dW has been formed and sent;
            empty if there is nothing to await.
        """
        shape = self.shapes.linears[weight.layer]
        if not shape.output_axis:
            return ""
        name = names.collective(weight.name, self.sum_kind)
        n_times = self.n_gradient_sums(weight.layer)
        nbytes = n_times * shape.input_bytes
        host.issue(name, self.sum_kind, nbytes, shape.output_axis, n_times)
        if self.backward_overlap.oar:
            return name
        host.wait(name)
        return ""

    def before_weight_gradient(self, host: HostProgram, layer: str) -> None:
        """Wait for what dW needs: its input, or room for another gradient.

        Called before the product that forms dW, and before the kernel that adds rows to the
        gradient of the embedding.
        """

    def bias_bytes(self, layer: str) -> Size:
        """Return the bytes that a kernel reads to form the gradient of a layer's bias.

        They are 0 where another kernel forms it. Called once dW has been formed.
        """
        return self.shapes.linears[layer].output_bytes

    def send_gradient(self, host: HostProgram, layer: str) -> None:
        """Start to bring the gradient of a layer's weight to where it is stored.

        Called once dW and the gradient of the bias have been formed. The embedding's is sent at
        the end of the backward pass, where no kernel follows that could wait; `accumulate` waits.
        """

    @property
    def reduces_later(self) -> bool:
        """Whether gradients are reduced at the end of the next block of the backward pass.

        The first block of that pass then ends differently from the blocks after it.
        """
        return False

    def end_block(self, host: HostProgram, is_first: bool) -> None:
        """Start to reduce gradients of blocks; called after a block's last backward kernel.

        `is_first` says whether this is the first block of the backward pass; it is always false
        unless `reduces_later`.
        """

    @property
    def embedding_starts_from_zero(self) -> Array | float:
        """Whether the embedding's gradient begins from zero (1) or adds to the head's (0)."""
        return 0.0 if self.shapes.model.tied_embeddings else 1.0

    # Stages of a pipeline --------------------------------------------------------------------

    @property
    def transfer_bytes(self) -> Array:
        """The number of bytes that a rank sends to the next stage."""
        return self.shapes.residual_bytes

    @property
    def handover_seconds(self) -> tuple[float, float]:
        """How long two stages stand still while one hands forward, or backward, what it sends."""
        return NO_HANDOVER

    def receive(self, host: HostProgram, chain: str) -> None:
        """Gather the parts of what the neighbouring stage has sent.

        Called at the start of a stage's forward pass (unless the stage has the embedding) and of
        its backward pass (unless it has the head), before `prefetch_weight`.
        """

    # Once per micro-step and once per step ---------------------------------------------------

    def accumulate(self, host: HostProgram, last_layer: str) -> None:
        """Wait for the last gradients of the micro-step, and add them to the earlier ones.

        Called after the last kernel of a backward pass, in a phase over what the rank stores.
        `last_layer` is the layer whose gradient was sent last.
        """

    def step_end(self, host: HostProgram) -> None:
        """Reduce the gradients, clip them, update the weights and bring them to their ranks.

        Called once, after all micro-steps, in a phase over what the rank stores. Every strategy
        must override it.
        """
        raise NotImplementedError

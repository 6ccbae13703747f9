"""The schedule 1F1B of a pipeline: after a warm-up, forward and backward passes alternate.

Narayanan et al., SC21, arXiv 2104.04473, figure 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


class Neighbours:
    """Exchanges tensors with the stages before and behind this one.

    What is sent and received at once is one batch, so that no two ranks wait for each other.
    """

    def __init__(self, ranks: Sequence[int], like: torch.Tensor) -> None:
        """Take the ranks of all stages, and a tensor with the shape of a micro-batch's stream."""
        self.stage = list(ranks).index(dist.get_rank())
        self.n_stages = len(ranks)
        self._ranks, self._like = ranks, like

    def exchange(
        self,
        sent: torch.Tensor | None = None,
        to: int = 0,
        received_from: int = 0,
    ) -> torch.Tensor | None:
        """Send a tensor to a neighbour and receive one from a neighbour; -1, 1 and 0 for none.

        Neighbours beyond the ends of the pipeline do not exist, and nothing is exchanged with them.
        """
        operations, received = [], None
        if to and sent is not None and 0 <= self.stage + to < self.n_stages:
            peer = self._ranks[self.stage + to]
            operations.append(dist.P2POp(dist.isend, sent.detach().contiguous(), peer))
        if received_from and 0 <= self.stage + received_from < self.n_stages:
            received = torch.empty_like(self._like)
            peer = self._ranks[self.stage + received_from]
            operations.append(dist.P2POp(dist.irecv, received, peer))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return received


def run_schedule(
    neighbours: Neighbours,
    n_micro_steps: int,
    forward: Callable[[int, torch.Tensor | None], torch.Tensor],
    backward: Callable[[torch.Tensor, torch.Tensor | None], None],
) -> None:
    """Run all micro-steps of a step on this stage.

    Parameters
    ----------
    forward : callable
        Takes the number of a micro-step and the stream that was received, if there is a stage
        before this one; returns the stage's output, or the loss on the last stage.
    backward : callable
        Takes such an output and the gradient that was received, if there is a stage behind.
    """
    n_ahead = min(neighbours.n_stages - 1 - neighbours.stage, n_micro_steps)
    under_way: list[tuple[torch.Tensor | None, torch.Tensor]] = []

    def go_forward(number: int, stream: torch.Tensor | None) -> torch.Tensor:
        if stream is not None:
            stream.requires_grad_()
        output = forward(number, stream)
        under_way.append((stream, output))
        return output

    def go_backward(gradient: torch.Tensor | None) -> torch.Tensor | None:
        stream, output = under_way.pop(0)
        backward(output, gradient)
        return None if stream is None else stream.grad

    for number in range(n_ahead):
        output = go_forward(number, neighbours.exchange(received_from=-1))
        neighbours.exchange(output, to=1)
    stream = neighbours.exchange(received_from=-1) if n_ahead < n_micro_steps else None
    for number in range(n_ahead, n_micro_steps):
        output = go_forward(number, stream)
        gradient = go_backward(neighbours.exchange(output, to=1, received_from=1))
        more = number + 1 < n_micro_steps
        stream = neighbours.exchange(gradient, to=-1, received_from=-1 if more else 0)
    while under_way:
        gradient = go_backward(neighbours.exchange(received_from=1))
        neighbours.exchange(gradient, to=-1)

"""ZeRO-3 through DeepSpeed."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist

from axonn_tune.runtime.axonn.optimizer import CLIP_NORM
from axonn_tune.runtime.native.plain import PlainGPT
from axonn_tune.runtime.native.trainer import RecordedTrainer, adamw, mean_loss
from axonn_tune.runtime.ranks.wait_recorder import WaitRecorder
from axonn_tune.runtime.released.torch_calls import TorchCalls
from axonn_tune.runtime.request import RunRequest
from axonn_tune.strategies.zero.zero import zero3

# DeepSpeed's defaults: up to how many elements a tensor stays whole, and how many are gathered
# ahead in one call (stage3_param_persistence_threshold, stage3_prefetch_bucket_size).
WHOLE_ELEMENTS = 100_000
PREFETCHED_ELEMENTS = 50_000_000


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for a device, without the kernel that it compiles for CPUs."""
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    # DeepSpeed calls functions that torch has replaced since.
    for category in (DeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", category)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    return importlib.import_module("deepspeed")


def forget_groups(deepspeed: Any) -> None:
    """Let DeepSpeed look up torch's functions and form groups of ranks anew."""
    deepspeed.comm.comm.cdb = None
    groups = deepspeed.utils.groups
    groups._WORLD_GROUP = None
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def settings_of(request: RunRequest, smallest_matrix: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a request, with the sizes of the engine's facts.

    Parameters
    ----------
    smallest_matrix : int
        Number of elements of the model's smallest matrix.

    Each matrix is gathered on its own, and none stays whole, as it is with matrices of the usual
    size: where the model's smallest matrix is below DeepSpeed's thresholds, they are lowered.
    """
    job = request.job
    program = request.engine.zero
    settings: dict[str, Any] = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": request.configuration.micro_batch,
        "gradient_clipping": CLIP_NORM,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": job.overlap.ors,
            "stage3_max_live_parameters": int(program.live_elements),
            "stage3_max_reuse_distance": int(program.live_elements),
            "stage3_param_persistence_threshold": min(WHOLE_ELEMENTS, smallest_matrix - 1),
            "stage3_prefetch_bucket_size": (
                min(PREFETCHED_ELEMENTS, smallest_matrix - 1) if job.overlap.oag else 0
            ),
            "reduce_bucket_size": int(program.bucket_elements),
        },
    }
    if job.dtype != "fp32":
        settings[job.dtype] = {"enabled": True}
    return settings


class DeepSpeedTrainer(RecordedTrainer):
    """Trains a model that DeepSpeed shards over all ranks."""

    def __init__(self, request: RunRequest, device: torch.device) -> None:
        recorder = WaitRecorder(device)
        super().__init__(recorder, request, device, dist.get_world_size(), dist.get_rank())
        self._calls = TorchCalls(recorder, request.configuration.layout, zero3().axes)
        # As the plan has it, and the programs of `launch`.
        model = PlainGPT(
            request.model, request.job.attention, request.configuration.recompute, reentrant=True
        ).initialise(request.seed)
        matrices = [weight for weight in model.parameters() if weight.dim() > 1]
        vectors = [weight for weight in model.parameters() if weight.dim() == 1]
        optimizer = adamw([matrices, vectors])
        deepspeed = import_deepspeed(device)
        forget_groups(deepspeed)
        with self._calls.recorded():
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
            self._engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                config=settings_of(request, min(weight.numel() for weight in matrices)),
            )

    def train(self, texts: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
        """Train on the micro-steps of this rank's share; DeepSpeed updates in the last one."""
        engine = self._engine
        total = torch.zeros((), device=self._device)
        with self._calls.recorded():
            for text in texts:
                loss = mean_loss(engine(text[:, :-1]), text)
                engine.backward(loss)
                engine.step()
                total += loss.detach() / len(texts)
        return total, float(engine.get_global_grad_norm())

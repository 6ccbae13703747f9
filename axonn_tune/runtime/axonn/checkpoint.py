"""Save and restore training with torch.distributed.checkpoint, on the same grid or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from axonn_tune.errors import FileError
from axonn_tune.runtime.axonn.boxes import BlockLayout
from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.runtime.axonn.optimizer import Optimizer


def save(path: str | Path, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Write weights, AdamW's moments and the number of steps done; all ranks must call this.

    The parameters are stored by their place in the whole model, so that any grid can read them.

    Raises
    ------
    FileError
        The checkpoint cannot be written.
    """
    state = _state(model, optimizer, step)
    try:
        dcp.save(state, checkpoint_id=path, planner=_SavePlanner(flatten_state_dict=False))
    except (OSError, dcp.api.CheckpointException) as error:
        raise FileError(f"checkpoint {path} cannot be written: {_last_line(error)}") from error


def load(path: str | Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Restore what `save` wrote; all ranks must call this.

    Returns
    -------
    int
        Number of steps that were done when the checkpoint was saved.

    Raises
    ------
    FileError
        The path holds no checkpoint, or the checkpoint of another model.
    """
    if not (Path(path) / ".metadata").is_file():
        raise FileError(f"{path} is not a checkpoint; allowed: a directory that was saved to")
    state = _state(model, optimizer, 0)
    try:
        dcp.load(state, checkpoint_id=path, planner=_LoadPlanner(flatten_state_dict=False))
    except (RuntimeError, ValueError, KeyError, dcp.api.CheckpointException) as error:
        raise FileError(f"checkpoint {path} does not fit the model: {_last_line(error)}") from error
    optimizer.restored(state["n_updates"])
    return state["step"]


def _state(model: nn.Module, optimizer: Optimizer, step: int) -> dict[str, Any]:
    # named_modules gives a tied weight its first name only.
    name_of = {module: name for name, module in model.named_modules()}
    stored = {
        f"{kind}.{name_of[owner]}": _Stored(piece, owner.layout, optimizer.mesh)
        for kind, pieces in optimizer.states().items()
        for owner, piece in zip(optimizer.owners, pieces, strict=True)
    }
    return {**stored, "step": step, "n_updates": optimizer.n_updates}


class _Stored:
    """The part of a parameter that this rank stores; torch asks it for its boxes."""

    def __init__(self, flat: torch.Tensor, layout: BlockLayout, mesh: Mesh) -> None:
        self._layout = layout
        self._flat = flat
        self._boxes = layout.stored_boxes(mesh)
        pieces = flat.split([int(torch.Size(sizes).numel()) for _, sizes in self._boxes])
        self._pieces = {
            torch.Size(offsets): piece.view(sizes)
            for (offsets, sizes), piece in zip(self._boxes, pieces, strict=True)
        }

    def size(self) -> torch.Size:
        """Return the shape of the whole parameter."""
        return torch.Size(self._layout.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in self._boxes
        ]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._flat)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def piece(self, index: MetadataIndex) -> torch.Tensor:
        """Return the view of the box that starts at the index."""
        assert index.offset is not None
        return self._pieces[index.offset]


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        item = self.state_dict[index.fqn]
        return item.piece(index) if isinstance(item, _Stored) else item


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # The default planner would replace objects of an unknown class by None.
        self.state_dict = state_dict
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        item = self.state_dict[index.fqn]
        return item.piece(index) if isinstance(item, _Stored) else item


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__

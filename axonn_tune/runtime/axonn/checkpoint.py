"""Save and restore training with torch.distributed.checkpoint, on the same grid or another.

A checkpoint is replaced as a whole: whoever is killed while saving leaves the one before. Damage
of any file is found before torch reads it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
from axonn_tune.io.files import digest
from axonn_tune.io.json_files import load_json, save_json
from axonn_tune.runtime.axonn.boxes import BlockLayout
from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.runtime.axonn.optimizer import Optimizer

# A checkpoint is a directory with a folder of shards and, written last, this file, which names the
# folder and the digest of each of its files.
INDEX = "checkpoint.json"


@dataclass(frozen=True)
class _Index:
    """The folder of a checkpoint's shards, and the SHA-256 of each file there."""

    folder: str
    digests: Mapping[str, str]


def save(path: str | Path, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Write weights, AdamW's moments and the number of steps done; all ranks must call this.

    The parameters are stored by their place in the whole model, so that any grid can read them.
    A checkpoint that stands there already is replaced when the new one is complete, at once.

    Raises
    ------
    FileError
        The checkpoint cannot be written.
    """
    path = Path(path)
    folder = path / _on_rank_0(lambda: f"shards-{os.urandom(8).hex()}")
    state = _state(model, optimizer, step)
    try:
        dcp.save(state, checkpoint_id=folder, planner=_SavePlanner(flatten_state_dict=False))
    except (OSError, dcp.api.CheckpointException) as error:
        raise FileError(f"checkpoint {path} cannot be written: {_last_line(error)}") from error
    digests = _digests(folder)
    _on_rank_0(lambda: _complete(path, _Index(folder.name, digests)))


def _complete(path: Path, index: _Index) -> None:
    """Make the new shards the checkpoint, and remove all others."""
    save_json(path / INDEX, index)
    for other in path.glob("shards-*"):
        if other.name != index.folder:
            shutil.rmtree(other, ignore_errors=True)


def load(path: str | Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Restore what `save` wrote; all ranks must call this.

    Torch unpickles a file of the checkpoint, so load only what you or people whom you trust saved.

    Returns
    -------
    int
        Number of steps that were done when the checkpoint was saved.

    Raises
    ------
    FileError
        The path holds no checkpoint, a damaged one, or that of another model.
    """
    path = Path(path)
    if not (path / INDEX).is_file():
        raise FileError(f"{path} is not a checkpoint; allowed: a directory that was saved to")
    index = load_json(path / INDEX, _Index)
    folder = path / Path(index.folder).name
    found = _digests(folder)
    for name in sorted({*found, *index.digests}):
        if found.get(name) != index.digests.get(name):
            raise FileError(f"checkpoint {path} is damaged: {name} is not what was saved")
    state = _state(model, optimizer, 0)
    try:
        dcp.load(state, checkpoint_id=folder, planner=_LoadPlanner(flatten_state_dict=False))
    except (RuntimeError, ValueError, KeyError, dcp.api.CheckpointException) as error:
        raise FileError(f"checkpoint {path} does not fit the model: {_last_line(error)}") from error
    optimizer.restored(state["n_updates"])
    return state["step"]


def _on_rank_0(action: Callable[[], str | None]) -> str:
    """Return on every rank what an action returns on rank 0; raise on every rank what it raises."""
    results: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            results = [action()]
        except FileError as error:
            results = [error]
    dist.broadcast_object_list(results)
    if isinstance(results[0], FileError):
        raise results[0]
    return results[0]


def _digests(folder: Path) -> dict[str, str]:
    """Return the digest of every file of a folder; each rank reads its part of the files."""
    here: dict[str, str] | FileError
    try:
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
        mine = names[dist.get_rank() :: dist.get_world_size()]
        here = {name: digest(folder / name) for name in mine}
    except FileError as error:
        here = error
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, here)
    for part in parts:
        if isinstance(part, FileError):
            raise part
    return {name: found for part in parts for name, found in part.items()}


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


def _looked_up(state: dict[str, Any], index: MetadataIndex) -> Any:
    """Return the box of a stored parameter that starts at an index, or another item as it is."""
    item = state[index.fqn]
    return item.piece(index) if isinstance(item, _Stored) else item


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return _looked_up(self.state_dict, index)


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
        return _looked_up(self.state_dict, index)


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__

"""Parts of a tensor that tensor parallelism divides, for torch's distributed checkpoints."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from toolkit.checkpoints.weights import Tensors
from toolkit.distributed.tensor_parallel import Cut
from toolkit.private_torch import first_row, local_shard


class Pieces(Tensor):
    """A rank's rows of a divided parameter, or of its optimizer state, as chunks of the complete tensor.

    A folder of shards then holds the complete tensor in the order of an undivided model. Implements DCP's protocol for
    tensors of other classes. The chunks share memory with ``value``, a DTensor or a plain tensor.
    """

    local: Tensor
    chunks: dict[torch.Size, Tensor]

    @classmethod
    def of(cls, value: Tensor, cut: Cut) -> "Pieces":
        local = local_shard(value.detach())
        self = local.new_zeros(()).expand(cut.shape).as_subclass(cls)  # no memory
        self.local, self.chunks = local, {}
        rest = () if len(cut.shape) == 1 else (cut.columns.start or 0, *(0,) * (len(cut.shape) - 2))
        for row, begin, length in cut.rows(first_row(value), local.size(0)):
            self.chunks[torch.Size((row, *rest))] = local[begin : begin + length]
        return self

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(fqn, offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for offset, chunk in zip(self.chunks, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, values.shape) for offset, values in self.chunks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.chunks[index.offset]


def as_pieces(tensors: Tensors, cuts: dict[str, Cut]) -> Tensors:
    """Replace the divided parameters among ``tensors`` by their pieces."""
    return {name: Pieces.of(value, cuts[name]) if name in cuts else value for name, value in tensors.items()}

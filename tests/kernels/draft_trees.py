"""Random draft trees for the tests of `spec_verify`."""

from __future__ import annotations

import torch
from torch import Tensor


def random_trees(num_rows: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """(nodes, parents, targets, num_nodes, max_depth). Few distinct tokens, so that walks are long and have ties."""
    generator = torch.Generator().manual_seed(seed + width)
    nodes = torch.randint(0, 3, (num_rows, width), generator=generator)
    targets = torch.randint(0, 3, (num_rows, width), generator=generator)
    num_nodes = torch.randint(1, width + 1, (num_rows,), generator=generator, dtype=torch.int32)
    parents = torch.full((num_rows, width), -1, dtype=torch.int32)
    depth = torch.zeros(num_rows, width, dtype=torch.int64)
    for node in range(1, width):
        parent = (torch.rand(num_rows, generator=generator) * min(node, 6)).long() + max(0, node - 6)
        parents[:, node] = parent.int()
        depth[:, node] = depth.gather(1, parent.unsqueeze(1)).squeeze(1) + 1
    return nodes, parents, targets, num_nodes, int(depth.max())

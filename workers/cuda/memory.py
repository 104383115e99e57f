"""The device's memory, shared out: what was measured, what is set aside, and what the KV pool may have.

`Budget` is plain arithmetic over measured numbers, so it can be tried without a device. It is printed as a table at
start, so that nobody has to guess where the memory went.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipring.shm.spec import WorkerConfig
from slipring.workers.kv_cache import DTYPES, MemoryShortageError, block_bytes

_LEAST_GRAPH_BYTES = 2 << 20
"""Set aside for one bucket's graphs at least: the driver takes memory 2 MiB at a time, so less cannot be seen."""
_MARGIN = 0.02
"""Share of free memory left alone: the driver's own growth, and gaps between the allocator's segments."""


@dataclass(frozen=True, slots=True)
class Budget:
    """All in bytes."""

    total: int
    """Free before anything of ours was loaded."""
    weights: int
    state: int
    """Row state, and the decode steps' static buffers."""
    activations: int
    """Peak of the largest step, and of the largest decode step after it."""
    graphs: int
    """Of all buckets. Captured activations live in a pool of their own, apart from those of other steps."""
    edits: int
    """Penalty counts, and what draws that edit logits and reports of prompts take beyond others."""
    margin: int

    @classmethod
    def measured(
        cls,
        total: int,
        weights: int,
        state: int,
        activations: int,
        graphs: tuple[int, int],
        num_buckets: int,
        edits: int,
    ) -> Budget:
        """`graphs`: what the largest bucket's took, and then the smallest's.

        Buckets are captured from the largest down, so that the pool which the first one makes has room for the others'
        activations; what the smallest adds is a graph's own cost, which each of the others may add.
        """
        largest, smallest = graphs
        of_all = largest + num_buckets * max(smallest, _LEAST_GRAPH_BYTES)
        return cls(total, weights, state, activations, of_all, edits, int(total * _MARGIN))

    @property
    def for_pool(self) -> int:
        """What is left; negative when the rest does not fit."""
        taken = self.weights + self.state + self.activations + self.graphs + self.edits + self.margin
        return self.total - taken

    def num_blocks(self, config: WorkerConfig) -> int:
        """Blocks of the KV pool: as told, or all that fit. Raises MemoryShortageError, which says what would fit."""
        each = block_bytes(config.model, config.block_size, DTYPES[config.dtype])
        fit = max(0, self.for_pool // each)
        wanted = config.num_blocks
        if wanted is None and config.kv_cache_bytes:
            wanted = config.kv_cache_bytes // each
        needed = -(-config.max_model_len // config.block_size)
        if wanted is not None and wanted > fit:
            raise MemoryShortageError(
                f"the KV cache needs {_gib(wanted * each)} but only {_gib(max(0, self.for_pool))} of device memory is "
                "left for it; lower --kv-cache-memory-bytes (or --num-gpu-blocks-override)\n" + self.table(fit, each)
            )
        if wanted is None and fit < needed:
            raise MemoryShortageError(self._too_long(config, fit, each))
        return fit if wanted is None else wanted

    def table(self, num_blocks: int, each: int) -> str:
        """The shares, a line each."""
        lines = [
            ("weights", self.weights),
            ("row state and buffers", self.state),
            ("activations (largest step)", self.activations),
            ("CUDA graphs (set aside)", self.graphs),
            ("edited draws (set aside)", self.edits),
            ("margin", self.margin),
            (f"KV cache ({num_blocks} blocks)", num_blocks * each),
            ("free at start", self.total),
        ]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"  {name:<{width}}  {_gib(size):>12}" for name, size in lines)

    def _too_long(self, config: WorkerConfig, fit: int, each: int) -> str:
        longest = fit * config.block_size
        text = f"a context of {config.max_model_len} tokens does not fit the KV cache that device memory allows"
        if longest:
            text += f"; the largest that fits is --max-model-len {longest}"
        else:
            text += "; not even one block fits: lower --max-num-batched-tokens or --max-num-seqs"
        return f"{text}\n{self.table(fit, each)}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"

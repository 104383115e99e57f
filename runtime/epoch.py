"""`Epoch`: one life of a replica's worker. Owns rings, doorbells, batch table and the process; passive.

An epoch is never mended. A fault ends it, and the next one has new rings and new eventfds, so that a worker which was
only stopped, and wakes up after all, writes where nobody looks any more. Order of the end: `kill`, `reaped`, then read
what was published, then `close`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from slipring.runtime.config import ResolvedConfig
from slipring.runtime.rendezvous import MeetingPoint
from slipring.runtime.worker_process import WorkerProcess
from slipring.shm import control, wire
from slipring.shm.control import ControlEnd
from slipring.shm.doorbell import Doorbell
from slipring.shm.life_lock import LifeLock
from slipring.shm.ring import RingReader, RingWriter, create_ring
from slipring.shm.segment import Segment
from slipring.shm.spec import ModelSpec, WorkerConfig
from slipring.shm.table import BatchTable
from slipring.shm.weights import WeightSegment
from slipring.shm.wire import SlotKind, StepInputView, StepOutputView, StepShape

SPIN_US = 50
_HISTORY = 8
"""Steps that the rings still hold when something breaks (the flight recorder reads them)."""
_CONTROL_BYTES = 16384
"""Room that a slot of the output ring has at least, for a worker's error record."""


class Epoch:
    def __init__(
        self,
        config: ResolvedConfig,
        spec: ModelSpec,
        number: int,
        weights: WeightSegment,
        meeting: MeetingPoint,
        tier: Segment | None = None,
    ) -> None:
        """Allocates the shared memory. Raises OSError when it is short; then nothing is left of it.

        `weights` and `tier` (the CPU tier's memory) belong to the engine and outlive every epoch; `meeting` is this
        epoch's, and closed with it.
        """
        self.number = number
        self._config = config
        self._spec = spec
        self._weights = weights
        self.step_shape = shape = StepShape.of(config.user.max_num_seqs, config.max_draft, config.user.block_size)
        self._tier = tier
        self.meeting = meeting
        self._segments: list[Segment] = []
        try:
            self.table = BatchTable(
                self._keep(Segment.create("batch table", config.table_shape.nbytes)), config.table_shape
            )
            slots, output_bytes = max(config.pipeline_depth + 2, _HISTORY), max(shape.output_bytes, _CONTROL_BYTES)
            self.steps = RingWriter(self._keep(create_ring("step ring", slots, shape.input_bytes, num_readers=1)))
            self.outputs = RingReader(self._keep(create_ring("output ring", slots, output_bytes, num_readers=1)))
            self._control_ring, self._reply_ring = (
                self._keep(create_ring(label, control.NUM_SLOTS, control.SLOT_BYTES, num_readers=1))
                for label in ("control ring", "reply ring")
            )
            self._life = LifeLock.create()
            self._keep(self._life.segment)
        except OSError:
            meeting.close()
            self._free_segments()
            raise
        self.step_views = [StepInputView(self.steps.payload(i), shape) for i in range(self.steps.num_slots)]
        self.output_views = [StepOutputView(self.outputs.payload(i), shape) for i in range(self.outputs.num_slots)]
        self.step_bell, self.output_bell = Doorbell(), Doorbell()
        self._control_bell, self.reply_bell = Doorbell(), Doorbell()
        self._bells = (self.step_bell, self.output_bell, self._control_bell, self.reply_bell)
        self.control = ControlEnd(RingWriter(self._control_ring), RingReader(self._reply_ring), self._control_bell)
        """What is said about grammars; `reply_bell` rings when the worker has said something."""
        self.ready: wire.Ready | None = None
        """The worker's word that it can serve, once it has come."""
        self._on_death: Callable[[int], None] | None = None
        self._exited = asyncio.Event()
        self.worker = WorkerProcess(self._on_worker_death, self._exited.set)
        self.closed = False
        """Its shared memory is gone."""

    def spawn(self, on_death: Callable[[int], None]) -> None:
        """Start the worker; `on_death(status)` is called when it is lost. Raises OSError."""
        self._on_death = on_death
        inherit = (
            self.steps.segment.fd,
            self.outputs.segment.fd,
            self.table.segment.fd,
            self._control_ring.fd,
            *([self._tier.fd] if self._tier is not None else []),
            self._reply_ring.fd,
            *(bell.fd for bell in self._bells),
            self._weights.fd,
            self._life.segment.fd,
            self.meeting.fd,
        )
        self.worker.spawn(
            self._config.user.worker_module,
            self._worker_config,
            inherit,
            self._config.worker_environment(),
            self._config.cpus,
        )

    def on_ready(self, ready: wire.Ready) -> None:
        """The worker can serve; it holds its life lock since it began."""
        self.ready = ready
        self.worker.watch(self._life)

    def outputs_are_there(self) -> bool:
        return self.outputs.try_read() is not None

    def publish_step(self, step_id: int) -> None:
        """Make the claimed slot visible to the worker."""
        self.steps.publish(SlotKind.STEP, self.step_shape.input_bytes, step_id)
        self.step_bell.ring()

    def ask_to_end(self) -> None:
        if self.worker.alive and self.steps.try_claim() is not None:
            self.steps.publish(SlotKind.SHUTDOWN, 0, 0)
            self.step_bell.ring()

    async def reaped(self, timeout_s: float) -> bool:
        """Whether the worker is gone, at the latest after `timeout_s`."""
        if self.worker.alive:
            try:
                await asyncio.wait_for(self._exited.wait(), timeout_s)
            except TimeoutError:
                return False
        return True

    def close(self) -> None:
        """Kill the worker, if it still lives, and give everything back. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.worker.close()
        self._exited.set()
        self._on_death = None
        for bell in self._bells:
            bell.close()
        self.meeting.close()
        self._free_segments()

    def _on_worker_death(self, status: int) -> None:
        if self._on_death is not None:
            self._on_death(status)

    def _keep(self, segment: Segment) -> Segment:
        self._segments.append(segment)
        return segment

    def _free_segments(self) -> None:
        while self._segments:
            self._segments.pop().close()

    def _worker_config(self, lifeline_fd: int) -> WorkerConfig:
        config, user = self._config, self._config.user
        return WorkerConfig(
            model=self._spec,
            rank=config.rank,
            epoch=self.number,
            group_host=self.meeting.host,
            group_port=self.meeting.port,
            group_fd=self.meeting.fd,
            parent_pid=os.getpid(),
            device=config.device,
            dtype=config.dtype,
            num_threads=config.num_threads,
            block_size=user.block_size,
            num_blocks=config.num_blocks,
            kv_cache_bytes=config.kv_cache_bytes,
            max_model_len=config.max_model_len,
            max_num_seqs=user.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_rows=config.num_rows,
            max_draft=config.max_draft,
            step_ring_fd=self.steps.segment.fd,
            step_ring_bytes=self.steps.segment.nbytes,
            output_ring_fd=self.outputs.segment.fd,
            output_ring_bytes=self.outputs.segment.nbytes,
            table_fd=self.table.segment.fd,
            table_bytes=self.table.segment.nbytes,
            control_ring_fd=self._control_ring.fd,
            control_ring_bytes=self._control_ring.nbytes,
            reply_ring_fd=self._reply_ring.fd,
            reply_ring_bytes=self._reply_ring.nbytes,
            step_doorbell_fd=self.step_bell.fd,
            output_doorbell_fd=self.output_bell.fd,
            control_doorbell_fd=self._control_bell.fd,
            reply_doorbell_fd=self.reply_bell.fd,
            tier_fd=None if self._tier is None else self._tier.fd,
            tier_bytes=0 if self._tier is None else self._tier.nbytes,
            weights_fd=self._weights.fd,
            life_lock_fd=self._life.segment.fd,
            lifeline_fd=lifeline_fd,
            reader_index=0,
            spin_us=SPIN_US,
            speculation=config.speculation,
        )

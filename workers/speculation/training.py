"""`python -m slipring.workers.speculation.training`: trains a draft head. Started by `runtime/train_draft.py` with a
`DraftTraining` on stdin; answers with a `TrainingReport` a line. With `CHECK_TRAINING` it only says whether it could
begin: the model is about to write for an hour.
"""

from __future__ import annotations

import sys

import msgspec
import torch
from safetensors import SafetensorError

from slipring.shm.spec import CHECK_TRAINING, DraftTraining, TrainingReport
from slipring.workers.speculation.eagle_training import EagleTrainer, start_of
from slipring.workers.speculation.medusa_training import MedusaTrainer

_TRAINERS = {"eagle": EagleTrainer, "medusa": MedusaTrainer}


def main() -> int:
    training = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=DraftTraining)
    torch.manual_seed(training.seed)
    torch.set_num_threads(training.num_threads)

    def report(line: TrainingReport) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()

    try:
        if sys.argv[1:] == [CHECK_TRAINING]:
            start_of(training)
            return 0
        trainer = _TRAINERS[training.method](training, report)
    except (OSError, ValueError, SafetensorError, msgspec.DecodeError) as error:
        print(f"slipring: {error}", file=sys.stderr)
        return 1
    report(trainer.run())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One table: the largest absolute difference from an fp64 or fp32 oracle, for inputs of about unit size."""

import torch

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 6e-3}
DTYPES = list(TOLERANCE)

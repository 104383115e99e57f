"""One table: the largest absolute difference from an fp64 or fp32 oracle, for inputs of about unit size."""

import torch

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 6e-3}
DTYPES = list(TOLERANCE)

ATTENTION_TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of paged attention against softmax in fp32 over the same stored keys and values, fp8 ones too."""

"""One file per operation: `x_ref` (the reference, which also runs the CPU), the kernel, and `x`, which picks."""

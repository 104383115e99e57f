"""Pure, synchronous scheduling policy: no torch, no asyncio, no clock, no I/O. Imports only `slipring.shm`."""

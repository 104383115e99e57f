"""The worker on a GPU: row state that lives on the device, steps enqueued ahead of their results, captured decoding.

One stream runs everything, in the order of submission, so no kernel of ours waits for an event; only the completion
thread does. `device.py` is the one place that calls CUDA; its `HostDevice` is the null twin on which all the rest
runs without a GPU (tensors on the CPU, work done at once, captures replayed as calls).
"""

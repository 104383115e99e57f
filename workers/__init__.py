"""Everything that touches a device: the worker process, models, loaders, KV pool and sampler."""

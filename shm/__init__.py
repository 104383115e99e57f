"""The contract between processes: segments, rings, records, doorbells and the batch table.

Everything in here may be mapped by the engine process and by its workers at the same time. This package imports
nothing else of the project, and never torch.
"""

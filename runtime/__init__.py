"""The engine process: the loop, the life of worker processes and of requests. Imports no torch."""

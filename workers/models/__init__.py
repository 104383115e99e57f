"""One file per model family; `registry.py` maps an architecture's name to its class."""

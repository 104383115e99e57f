"""Guessing tokens ahead: proposers make drafts from the worker's own row state, the target's own draws judge them."""

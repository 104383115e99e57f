"""KV tiers, the scheduler's side: which blocks lie where, what is stored, loaded and evicted. Pure and synchronous."""

"""KV tiers beyond the device: where pages of KV are kept, and the threads that move them. No torch."""

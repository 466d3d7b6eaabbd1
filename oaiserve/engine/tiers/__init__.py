"""Lower tiers, which store KV blocks that leave the device: host memory, and files on disk."""

"""Lower tiers, which get the KV blocks that leave the device: host memory, and files on disk."""

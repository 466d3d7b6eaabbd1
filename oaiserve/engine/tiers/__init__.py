"""Where KV blocks go that leave the device: host memory, files on disk, and what the scheduler asks of both."""

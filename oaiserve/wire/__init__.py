"""What gateways and replicas tell each other: reports, prefix keys, routing decisions, continued streams."""

"""Data that gateways exchange with replicas, and servers with the load test, which reads recordings and limits."""

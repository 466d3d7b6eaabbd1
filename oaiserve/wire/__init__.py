"""What processes exchange: gateways and replicas, and servers and the load test, which reads recordings and limits."""

"""Facts that all rooms share: records, stamps and traces of requests, reports of replicas, limits, recordings."""

"""One address in front of several replicas: `oaiserve route` passes each request to the one that the router chooses."""

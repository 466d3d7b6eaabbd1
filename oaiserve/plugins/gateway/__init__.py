"""One address in front of several replicas: `oaiserve route` passes each request to one by the router's choice."""

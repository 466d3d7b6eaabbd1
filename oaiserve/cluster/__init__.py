"""Several replicas of the server: which of them a request goes to. Nothing here serves, and nothing needs a network."""

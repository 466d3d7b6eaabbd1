"""/v1/files and /v1/batches: requests in a file that are answered while nobody else needs the machine."""

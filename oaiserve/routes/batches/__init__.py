"""/v1/files and /v1/batches: requests of a file that are answered when nobody else needs the machine."""

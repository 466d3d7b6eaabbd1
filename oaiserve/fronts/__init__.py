"""Several front processes share the port of one server: each has connections, and runs the routes that generate.

The main process has everything else: the engine, stores, batches, pages, metrics and the records of all requests.
"""

"""Several front processes share the port of one server. Each has its own connections and runs the generating routes.

The main process has everything else: the engine, stores, batches, pages, metrics and the records of all requests.
"""

"""Door: what happens to every request before its route and after it.

- layers.py puts the middleware in order: ids, slashes, paced refusals and errors (middleware.py), and access
  (access.py).
- accounting.py opens the exchange of a request for the engine, and makes the record of it.
- backend.py answers requests that a plug-in sends by itself.
"""

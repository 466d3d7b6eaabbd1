"""The names of the ASGI extensions by which the server and its routes speak about a request's connection."""

# A mapping of functions: `cut()` ends the connection, whatever waits in it; `awaits_body()` returns whether the body of
# the request that is being answered has not come to its end.
CONNECTION = "oaiserve.http.connection"
WRITE_TIMED_OUT = "oaiserve.write_timed_out"  # present once the server has cut the connection for that

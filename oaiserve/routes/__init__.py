"""The API over HTTP: one file per group of routes, and the packages through which a request passes.

A request enters through door/, which gives it an exchange (exchange.py) and decides about access. Its route calls
`intake.read`, which returns the route's answer to the `Intake`. For that, the route reads its own parameters, what a
conversation says (chat/), and how the model writes calls and reasoning (dialects/). answer/ submits the request to the
engine and writes the answer. serving.py has the parts of the server that all of them need. Imports point in this order
only, as a contract in pyproject.toml says.
"""

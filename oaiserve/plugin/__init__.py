"""The door for plug-ins: what they bring, and all that they can rely on. docs/plugins.md has an example of each part.

A plug-in is a module with a `plugin`: a `Plugin`, or a function that makes one from its settings, the table
[plugins.NAME] of the config file. The server finds it by an entry point of the group `oaiserve.plugins`, whose name is
NAME, or by `--plugin`, where NAME is that of the module:

>>> from starlette.requests import Request
>>> from starlette.responses import JSONResponse
>>> from starlette.routing import Route
>>> async def lengths(request: Request) -> JSONResponse:
...     server = Server(request.app)
...     return JSONResponse({"max_model_len": server.max_model_len, "you": Server.client_of(request)})
>>> plugin = Plugin(name="lengths", routes=lambda config: [Route("/v1/lengths", lengths)])
>>> plugin.parts
['routes']

It may rely on the names in `__all__` of this module and of `dialects`, `keys` and `models` beside it. All other modules
of oaiserve may change in any release.

If a plug-in raises `StartupError`, when it is imported or when the server starts, the server does not start. Any other
error is logged with the plug-in's name, and the server continues without that part.

>>> raise StartupError("'file' is missing in [plugins.ledger].")
Traceback (most recent call last):
oaiserve.errors.StartupError: 'file' is missing in [plugins.ledger].

Routes and `Server.ask` raise an `APIError`, which the server renders with its status:

>>> busy = APIError("There is no room for this.", code="full", retry_after_seconds=1)
>>> busy.status, busy.body()["error"]["code"], busy.headers()
(500, 'full', {'retry-after': '1'})

A `Command` names the module that runs it, a `Metric` is shown by `Server.show`, `observe` gets a `RequestRecord` for
each ended request, and the other parts get the `Config` of the server:

>>> Command("Print the ledger.", "oaiserve_ledger.command").module
'oaiserve_ledger.command'
>>> Metric("ledger_lines_total", "counter", "Lines that were written.").labels
()
>>> Config("demo").model_names
('demo',)
>>> {"client", "model", "outcome", "prompt_tokens"} <= RequestRecord.__dataclass_fields__.keys()
True
"""

from oaiserve.config import Config
from oaiserve.errors import APIError, StartupError
from oaiserve.facts.metric import Metric
from oaiserve.facts.record import RequestRecord
from oaiserve.plugin.parts import Command, Plugin
from oaiserve.plugin.server import Server

__all__ = ["APIError", "Command", "Config", "Metric", "Plugin", "RequestRecord", "Server", "StartupError"]

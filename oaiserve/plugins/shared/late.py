"""An endpoint that is imported with its first request."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from oaiserve.routes.operation import Operation


class LateEndpoint:
    """An ASGI app that is imported with its first request, or with the first look at its description: most servers get
    no request for it."""

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    @property
    def _endpoint(self) -> Any:
        return getattr(import_module(self._module), self._name)

    @property
    def operation(self) -> Operation | None:
        from oaiserve.routes.operation import operation_of

        return operation_of(self._endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint(scope, receive, send)

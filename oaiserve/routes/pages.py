"""The pages for browsers that plug-ins bring."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Pages for browsers, and their files.

    A page needs no API key, because a browser cannot send one when it opens a page. So a page holds no data: it asks
    its user for the key, and sends it with everything else that it loads. All addresses in a page are relative, so a
    proxy may serve it under a prefix.
    """

    routes: Sequence[Route] = ()  # They need no API key.
    of_requests: Sequence[Route] = ()  # Pages that show everyone's requests, only on a server that does.
    chat: Endpoint | None = None  # what / answers to browsers, if the model generates text
    links: Mapping[str, str] = field(default_factory=dict)  # relative addresses of pages, by their names at /
    request: str = ""  # The relative address of a request's page is this and the request's id.

    def and_those(self, others: Pages) -> Pages:
        """Return the pages of both. Where there can be only one, these come first."""
        return Pages(
            routes=[*self.routes, *others.routes],
            of_requests=[*self.of_requests, *others.of_requests],
            chat=self.chat or others.chat,
            links={**others.links, **self.links},
            request=self.request or others.request,
        )

    def shown(self, closed: Endpoint | None) -> Pages:
        """Return the pages of a server. Unless it is None, `closed` replaces the pages that show requests."""
        if closed is None:
            return replace(self, routes=[*self.routes, *self.of_requests], of_requests=())
        hidden = {route.path.removeprefix("/") for route in self.of_requests}
        return replace(
            self,
            routes=[*self.routes, *(Route(route.path, closed) for route in self.of_requests)],
            of_requests=(),
            links={name: to for name, to in self.links.items() if to not in hidden},
            request="",
        )

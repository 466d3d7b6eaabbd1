"""The pages for browsers that plug-ins bring."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A page with the header and the navigation of all pages, whatever plug-in it is from."""

    path: str
    # In the plug-in's folders, with a name that no other plug-in uses: what belongs in the page's <head>, an empty
    # line, and its <main>.
    file: str
    summary: str  # shown in the API's description
    link: str = ""  # the text of the link to it in the navigation, if there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Pages for browsers, and their files.

    A page needs no API key, because a browser cannot send one when it opens a page. So a page holds no data: it asks
    its user for the key, and sends it with everything else that it loads. All addresses in a page are relative, so a
    proxy may serve it under a prefix.
    """

    routes: Sequence[Route] = ()  # They need no API key.
    views: Sequence[View] = ()  # Pages that show everyone's requests. A server may close them.
    frame: Callable[[View], Endpoint] | None = None  # Serves the views of all plug-ins; without it there are none.
    folders: Sequence[Path] = ()  # The frame serves their files as dashboard/static/NAME; the first one of a name wins.
    parts: Sequence[tuple[str, str]] = ()  # A view's file, with a file to insert into the view's slot "parts".
    chat: Endpoint | None = None  # the page at / for browsers, if the model generates text
    links: Mapping[str, str] = field(default_factory=dict)  # relative addresses of pages, by their names at /
    request: str = ""  # The relative address of a request's page is this and the request's id.

    def check(self, others: Pages) -> None:
        """Raise ValueError for a view or part that the frame cannot show next to others, or a missing folder."""
        for folder in self.folders:
            if not folder.is_dir():
                raise ValueError(f"'{folder}' is not a folder.")
        for view in self.views:
            if not view.path.startswith("/"):
                raise ValueError(f"The path of a view must begin with '/', but got '{view.path}'.")
        for name in (*(view.file for view in self.views), *(part for _, part in self.parts)):
            file = next((folder / name for folder in self.folders if (folder / name).is_file()), None)
            if file is None:
                raise ValueError(f"No folder of the plug-in has the file '{name}', which a view or part names.")
            if any((folder / name).is_file() for folder in others.folders):
                raise ValueError(f"Another plug-in has a file '{name}', too. Give '{file}' another name.")
            if "\n\n" not in file.read_text("utf-8"):
                raise ValueError(f"'{file}' needs an empty line between what belongs in <head> and the rest.")

    def and_those(self, others: Pages) -> Pages:
        """Return the pages of both. Where there can be only one, these come first."""
        return Pages(
            routes=[*self.routes, *others.routes],
            views=[*self.views, *others.views],
            frame=self.frame or others.frame,
            folders=[*self.folders, *others.folders],
            parts=[*self.parts, *others.parts],
            chat=self.chat or others.chat,
            links={**others.links, **self.links},
            request=self.request or others.request,
        )

    def without(self, name: str) -> Pages:
        """Return the pages without the one that has this name at /."""
        links = {**self.links}
        path = f"/{links.pop(name, '')}"
        return replace(self, routes=[route for route in self.routes if route.path != path], links=links)

    def shown(self, closed: Endpoint | None) -> Pages:
        """Return the pages of a server. Unless it is None, `closed` replaces the pages that show requests."""
        frame = self.frame
        views = [] if frame is None else [Route(view.path, closed or frame(view)) for view in self.views]
        shown = replace(self, routes=[*self.routes, *views])
        if closed is None:
            return shown
        hidden = {view.path.removeprefix("/") for view in self.views}
        return replace(shown, links={name: to for name, to in self.links.items() if to not in hidden}, request="")

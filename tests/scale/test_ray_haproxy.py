"""Ray's configuration of HAProxy is changed where it says what Ray 2.60 writes, and HAProxy accepts it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from oaiserve.scale.on_ray.haproxy import MARK, binary, changed

# As Ray 2.60 writes it for one replica, the lines that do not matter left out.
CONFIG = """\
global
    maxconn 4096
defaults
    mode http
    timeout connect 1s
    timeout client 60s
    timeout server 600s
    log global
    option httplog
    option abortonclose
    retry-on conn-failure
    retries 2
    errorfile 502 /tmp/500.http
    errorfile 503 /tmp/500.http
    errorfile 504 /tmp/500.http
    balance leastconn
frontend http_frontend
    bind 127.0.0.1:8000
    unique-id-format %[uuid]
    http-request set-header x-request-id %[unique-id] if !{ req.hdr(x-request-id) -m found }
    acl is_http-default path_beg /
    http-request set-var(txn.ingress_request_router_app) str(http-default) if is_http-default
    acl has_ingress_request_router_app var(txn.ingress_request_router_app) -m found
    http-request lua.route_via_ingress_request_router if METH_POST has_ingress_request_router_app
    http-request set-var(txn.ingress_request_router_recoverable) str(1) if { var(txn.ingress_request_router_app) -m str "http-default" } { var(txn.ingress_request_router_failed) -m str "unknown_replica_id" }
    http-request return status 503 content-type text/plain lf-string "Ingress request router failed: %[var(txn.ingress_request_router_failed)]" hdr X-Serve-Reason %[var(txn.ingress_request_router_failed)] if { var(txn.ingress_request_router_failed) -m found } !{ var(txn.ingress_request_router_recoverable) -m found }
    use_backend http-default-via-ingress-request-router if is_http-default { var(txn.via_ingress_request_router) -m found }
    use_backend http-default-via-ingress-request-router if is_http-default { var(txn.ingress_request_router_failed) -m str "unknown_replica_id" }
    use_backend http-default if is_http-default
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \'%[path]\' not found. Ping http://.../-/routes for available routes."
backend http-default
    default-server fastinter 250ms downinter 250ms fall 2 rise 2 inter 1s check
    server SERVE_REPLICA__default-replica-abc 127.0.0.1:30000 check observe layer4 error-limit 3 on-error mark-down
    server SERVE_PROXY_ACTOR-1 127.0.0.1:8500 check backup
backend http-default-via-ingress-request-router
    use-server SERVE_REPLICA__default-replica-abc if { var(txn.ingress_request_router_target) -m str "SERVE_REPLICA__default-replica-abc" }
    use-server SERVE_PROXY_ACTOR-1 if { var(txn.ingress_request_router_failed) -m str "unknown_replica_id" }
    server SERVE_REPLICA__default-replica-abc 127.0.0.1:30000 track http-default/SERVE_REPLICA__default-replica-abc
    server SERVE_PROXY_ACTOR-1 127.0.0.1:8500 track http-default/SERVE_PROXY_ACTOR-1 backup
"""  # noqa: E501


def without(config: str, *texts: str) -> str:
    """Return the configuration without the lines that have one of the texts."""
    return "".join(line for line in config.splitlines(True) if not any(text in line for text in texts))


# While it builds the application anew: the backend has its fallback only, and there is no router.
OF_ROUTER = CONFIG.index("\nbackend http-default-via") + 1
BUILDING = without(CONFIG[:OF_ROUTER], "SERVE_REPLICA", "unique-id", "ingress_request_router", "ingress-request-router")


def test_errors_of_the_front_are_those_of_the_api() -> None:
    lines = [line for line in changed(CONFIG).splitlines() if "http-error" in line or "request return" in line]
    assert sorted(re.findall(r"status (\d+)", "\n".join(lines))) == ["400", "408", "413", "502", "503", "503", "504"]
    for line in lines:
        body = json.loads(re.findall("'(.*)'", line)[0].replace("%%", "%"))
        assert body["error"].keys() == {"message", "type", "param", "code", "request_id"}


@pytest.mark.parametrize(
    ("line", "is_there"),
    [
        # A router that fails costs no request.
        ("Ingress request router failed", False),
        ("unknown_replica_id", False),
        ("    use_backend http-default if is_http-default\n", True),
        # A request that was not answered is sent to another replica.
        ("    retry-on conn-failure empty-response\n", True),
        # Nothing falls back on the Python proxy, and errors are those of the API.
        ("SERVE_PROXY_ACTOR", False),
        ("errorfile", False),
    ],
)
def test_lines_are_changed_and_taken_out(line: str, is_there: bool) -> None:
    assert (line in changed(CONFIG)) is is_there


def test_a_backend_without_servers_keeps_those_that_it_had() -> None:
    server = "    server SERVE_REPLICA__default-replica-abc 127.0.0.1:30000 check observe layer4"
    assert server not in changed(BUILDING)
    kept = changed(BUILDING, changed(CONFIG))
    assert kept[kept.index("backend http-default\n") :].count(server) == 1
    assert kept.index("default-server") < kept.index(server)
    assert changed(BUILDING, kept) == kept, "however often Ray writes it anew"


def test_a_backend_with_servers_has_only_these() -> None:
    new = CONFIG.replace("replica-abc", "replica-def")
    assert changed(new, changed(CONFIG)) == changed(new)


def test_the_front_has_its_rules_without_a_router() -> None:
    for config in (CONFIG, BUILDING):
        lines = changed(config).splitlines()
        front = lines.index("frontend http_frontend")
        rules = lines[front + 2 : lines.index("    acl is_http-default path_beg /")]
        assert "    http-request del-header x-oaiserve- -m beg" in rules
        assert [line.split()[:2] for line in rules if "unique-id" in line] == [
            ["unique-id-format", "%[uuid]"],
            ["http-request", "set-header"],
        ]


def test_each_change_is_made_once() -> None:
    once = changed(CONFIG)
    assert once.startswith(MARK)
    assert changed(once) == once


def test_another_file_stays_as_it_is() -> None:
    assert changed("global\n    maxconn 10\n") == f"{MARK}\nglobal\n    maxconn 10\n"


@pytest.mark.haproxy
@pytest.mark.parametrize("text", [changed(CONFIG), changed(BUILDING, changed(CONFIG))], ids=["router", "building"])
def test_haproxy_accepts_the_configuration(tmp_path: Path, text: str) -> None:
    action = tmp_path / "action.lua"
    action.write_text('core.register_action("route_via_ingress_request_router", {"http-req"}, function() end, 0)')
    file = tmp_path / "haproxy.cfg"
    file.write_text(text.replace("global\n", f"global\n    lua-load-per-thread {action}\n", 1))
    found = subprocess.run([binary(), "-c", "-f", str(file)], capture_output=True, text=True, timeout=30)
    assert found.returncode == 0, found.stderr

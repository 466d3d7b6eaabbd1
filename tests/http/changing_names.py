"""Fetches from a name whose addresses change with each look-up, by a resolver and servers on loopback addresses:
unshare --mount --net python -m tests.http.changing_names

Needs namespaces of its own, since it replaces the machine's resolver. 127.0.0.2 is an address that the flag names,
127.0.0.3 one that it doesn't. Prints how many files were fetched and refused; the exit code is 1 if the second address
was ever reached.
"""

import asyncio
import fcntl
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections import Counter

from oaiserve.errors import NotFetched
from oaiserve.http.fetch import Fetcher

OPEN = "127.0.0.2"
CLOSED = "127.0.0.3"
ANSWERS = [[OPEN], [CLOSED], [OPEN, CLOSED], [CLOSED, OPEN], [OPEN], [OPEN], []]  # results of look-ups, in turn
NUM_FETCHES = 70
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 9\r\n\r\n"


def raise_loopback() -> None:
    up = struct.pack("16sh", b"lo", 0x41)  # IFF_UP and IFF_RUNNING
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, up + bytes(16))  # SIOCSIFFLAGS


def use_own_resolver() -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write("nameserver 127.0.0.1\n")
        file.flush()
        subprocess.run(["mount", "--bind", file.name, "/etc/resolv.conf"], check=True)


def resolve() -> None:
    """Answer queries for addresses of IPv4 with ANSWERS in turn, and all others with nothing."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    num_answered = 0
    server.bind(("127.0.0.1", 53))
    while True:
        query, client = server.recvfrom(512)
        question = query[12 : query.index(b"\0", 12) + 5]
        addresses: list[str] = []
        if question[-4:] == b"\0\1\0\1":
            addresses = ANSWERS[num_answered % len(ANSWERS)]
            num_answered += 1
        records = b"".join(b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4" + socket.inet_aton(each) for each in addresses)
        server.sendto(query[:2] + struct.pack(">HHHHH", 0x8180, 1, len(addresses), 0, 0) + question + records, client)


async def fetch_all() -> Counter[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found[writer.get_extra_info("sockname")[0]] += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + writer.get_extra_info("sockname")[0].encode())
        writer.close()

    found: Counter[str] = Counter()
    for address in (OPEN, CLOSED):
        await asyncio.start_server(serve, address, 8080)
    fetcher = Fetcher(["*.changing.test:8080", OPEN])
    for number in range(NUM_FETCHES):
        try:
            content = await fetcher.fetch(f"http://{number}.changing.test:8080/", "image", 100, lambda _: None)
            found["fetched"] += content == OPEN.encode()
        except NotFetched as error:
            found["refused" if "a private one" in str(error) else "without an address"] += 1
    return found


def main() -> int:
    raise_loopback()
    use_own_resolver()
    threading.Thread(target=resolve, daemon=True).start()
    found = asyncio.run(fetch_all())
    print(", ".join(f"{name}: {found[name]}" for name in (OPEN, CLOSED, "fetched", "refused", "without an address")))
    return 1 if found[CLOSED] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Where requests go: one base URL, the request head that is the same every time, and how a connection to it is made."""

import asyncio
import errno
import socket
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

from kvbench.clock import Clock
from kvbench.core import OutcomeName
from kvbench.target.connection import Connection, Timeouts


class ConnectError(Exception):
    """No connection came to be. `cause`: connect, or connect_dns, connect_refused, connect_tls where it is known why."""

    def __init__(self, outcome: OutcomeName, cause: str, text: str) -> None:
        super().__init__(text)
        self.outcome, self.cause, self.text = outcome, cause, text


class Origin:
    """A server. `base`: its URL without a trailing slash or /v1. `head`: all of a request's head up to the body's length.

    Raises ValueError for a URL that is not plain http or https; one with a password or a query is refused without repeating it.
    """

    def __init__(self, url: str, path: str, headers: Mapping[str, str], tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("urls: no credentials, query or fragment in a URL (keys come from the environment: key_env)")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"urls: {url!r} is not a URL like http://127.0.0.1:8000")
        self.base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self.host, self.port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = tls if parts.scheme == "https" else None
        target = urlsplit(self.base).path + path
        self.head = f"POST {target} HTTP/1.1\r\nHost: {parts.netloc}\r\n".encode() + _lines(headers) + b"Content-Length: "
        self.idle: list[Connection] = []
        self.alive: set[Connection] = set()

    async def connect(self, clock: Clock, timeouts: Timeouts, patience: float) -> Connection:
        """A fresh connection within `patience` seconds (inf: however long it takes). Raises ConnectError."""
        loop = clock.loop
        try:
            async with asyncio.timeout(None if patience == float("inf") else patience):
                _, connection = await loop.create_connection(
                    lambda: Connection(clock, timeouts, self.idle, self.alive), self.host, self.port, ssl=self.tls
                )
        except TimeoutError:
            raise ConnectError("timeout", "connect", f"no connection to {self.base} within {patience:.3g} s") from None
        except (OSError, UnicodeError) as error:
            cause = _cause(error, self.tls is not None)
            raise ConnectError("failed", cause, f"cannot connect to {self.base}: {error}") from None
        return connection


def _cause(error: Exception, tls: bool) -> str:
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return "connect_dns"
    # a name with several addresses fails with one OSError that only quotes the errors of each
    if isinstance(error, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in str(error):
        return "connect_refused"
    if isinstance(error, ssl.SSLError) or (tls and isinstance(error, ConnectionError)):
        return "connect_tls"
    return "connect"


def _lines(headers: Mapping[str, str]) -> bytes:
    """Header lines; a later one replaces an earlier one of its name in any case. Values may be secret: no error quotes one."""
    merged = {name.lower(): (name, value) for name, value in headers.items()}
    for name, value in merged.values():
        if not name or any(c in name + value for c in "\r\n\0") or not (name + value).isprintable():
            raise ValueError(f"headers: {name!r} holds a character that HTTP does not allow")
        if name.lower() in ("content-length", "transfer-encoding", "host", "connection"):
            raise ValueError(f"headers: {name!r} is set by kvbench itself")
    return "".join(f"{name}: {value}\r\n" for name, value in merged.values()).encode()

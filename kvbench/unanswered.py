"""Why a question over aiohttp got no answer, in the system's words: of discovery, resets, scrapes and agents."""

import os
import re
import socket
import ssl

import aiohttp


def why(error: BaseException) -> str:
    """aiohttp's own texts repeat the address, and how it holds its TLS context."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError) and cause.errno and cause.errno > 0:
        return os.strerror(cause.errno).lower()
    if isinstance(cause, socket.gaierror):
        return (cause.strerror or str(cause)).lower()
    return re.sub(r" ssl:\S+ \[(.*)\]$", r": \1", str(cause)) or type(error).__name__

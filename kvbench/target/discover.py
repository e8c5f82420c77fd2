"""What answers at a URL: asked before the run, over aiohttp, away from the hot path. Nothing here ever repeats a header."""

import ssl
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from kvbench.target import TargetUnreachable
from kvbench.unanswered import why

PATIENCE = aiohttp.ClientTimeout(total=10)
_UNANSWERED = (aiohttp.ClientError, TimeoutError, OSError)


async def discover(bases: Sequence[str], model: str, headers: Mapping[str, str], tls: ssl.SSLContext | None) -> dict[str, Any]:
    """Facts for the manifest: per server its models, their context lengths, version and Server header; and what looks wrong.

    Any HTTP answer counts as reachable. Raises TargetUnreachable for the first server that gives none.
    """
    async with opened(headers, tls) as session:
        servers = [await _server(session, base) for base in bases]
    lengths = [server["max_context"].get(model) for server in servers]
    known = [length for length in lengths if length is not None]
    warnings = []
    for server in servers:
        if server["status"] >= 400:
            warnings.append(f"{server['url']}/v1/models answers {server['status']}")
        elif server["models"] and model not in server["models"]:
            warnings.append(f"{server['url']} does not list model {model!r}: it has {', '.join(server['models'][:5])}")
    context = min(known) if known else None
    return {"kind": "http", "model": model, "max_context": context, "servers": servers, "warnings": warnings}


async def tokenize(
    base: str, model: str, prompt: Mapping[str, Any], headers: Mapping[str, str], tls: ssl.SSLContext | None
) -> list[int] | None:
    """The token ids of `prompt` ({"prompt": text} or {"messages": [...]}) by the server's /tokenize (vLLM's form), with the
    special tokens and the chat template it adds; None without one."""
    async with opened(headers, tls) as session:
        try:
            async with session.post(f"{base}/tokenize", json={"model": model, **prompt}) as answer:
                said = await answer.json(content_type=None) if answer.status == 200 else None
        except (*_UNANSWERED, ValueError):
            return None
    tokens = said.get("tokens") if isinstance(said, dict) else None
    return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else None


def opened(headers: Mapping[str, str], tls: ssl.SSLContext | None) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(ssl=tls if tls is not None else True)
    return aiohttp.ClientSession(headers=headers, timeout=PATIENCE, connector=connector)


async def _server(session: aiohttp.ClientSession, base: str) -> dict[str, Any]:
    try:
        async with session.get(f"{base}/v1/models") as answer:
            status, software = answer.status, answer.headers.get("Server")
            listed = await _json(answer)
    except _UNANSWERED as error:
        raise TargetUnreachable(f"nothing answers at {base}/v1/models: {_why(error)}") from None
    try:
        async with session.get(f"{base}/version") as answer:
            version = (await _json(answer)).get("version") if answer.status == 200 else None
    except _UNANSWERED:
        version = None
    data = listed.get("data")
    entries = data if isinstance(data, list) else []
    models = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    return {
        "url": base,
        "status": status,
        "software": software,
        "version": version,
        "models": [entry["id"] for entry in models],
        "owner": models[0].get("owned_by") if models else None,
        "max_context": {entry["id"]: entry["max_model_len"] for entry in models if isinstance(entry.get("max_model_len"), int)},
    }


def _why(error: BaseException) -> str:
    return f"silent for {PATIENCE.total:g} s" if isinstance(error, TimeoutError) else why(error)


async def _json(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """The body as a JSON object; {} where it is something else."""
    try:
        said = await answer.json(content_type=None)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}

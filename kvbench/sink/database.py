"""One batch of lines to a database over HTTP, and what its answer means. No retries here, and no word of the token anywhere."""

import base64
import http.client
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, urlencode, urlsplit

from kvbench.clock import wall_time
from kvbench.core import Seconds

PATIENCE: Seconds = 60.0  # the longest that a Retry-After is followed
_SAID = 2000  # characters of an answer that are kept


class Reply(NamedTuple):
    """status: None where there was no answer. said: the server's words or the error's. after: how long it asked us to wait."""

    status: int | None
    said: str = ""
    after: Seconds | None = None

    @property
    def ok(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def passing(self) -> bool:
        """Trying again later may help."""
        return self.status is None or self.status in (404, 408, 429) or self.status >= 500

    @property
    def refused(self) -> bool:
        """Some line in it is wrong: 400, and 422 of 2.x."""
        return self.status in (400, 422)

    @property
    def partial(self) -> bool:
        """It was refused, and its good lines were stored all the same."""
        return self.refused and "partial write" in self.said

    def __str__(self) -> str:
        said = self.said if len(self.said) <= 200 else f"{self.said[:200]}…"
        return said if self.status is None else f"{self.status} ({said})" if said else str(self.status)


class Database(Protocol):
    """Where lines go."""

    where: str  # for people: the address written to

    def post(self, lines: bytes) -> Reply:
        """Write lines, ns stamps. Blocks for as long as `timeout`; never raises."""

    def close(self) -> None: ...


class V1:
    """`POST /write?db=`: InfluxDB 1.x, VictoriaMetrics, and what else speaks it. token: "user:password", or a bearer token."""

    def __init__(self, url: str, database: str, token: str | None, timeout: Seconds) -> None:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=timeout)
        self._path = f"{parts.path.rstrip('/')}/write?{urlencode({'db': database, 'precision': 'ns'}, quote_via=quote)}"
        self._secrets = _hidden(token)
        self._headers = {"Content-Type": "text/plain; charset=utf-8"}
        if token is not None and ":" in token:
            self._headers["Authorization"] = f"Basic {base64.b64encode(token.encode()).decode()}"
        elif token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self.where = f"{url.rstrip('/')}/write?db={database}"

    def post(self, lines: bytes) -> Reply:
        try:
            return self._post(lines)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            return Reply(None, _why(error))

    def _post(self, lines: bytes) -> Reply:
        self._connection.request("POST", self._path, lines, self._headers)
        answer = self._connection.getresponse()
        said = answer.read(1 << 16)
        if answer.will_close:
            self._connection.close()
        return Reply(answer.status, _said(said, self._secrets), _seconds(answer.getheader("Retry-After")))

    def close(self) -> None:
        self._connection.close()


class V2:
    """`POST /api/v2/write` through influxdb-client's synchronous writer: InfluxDB 1.8, 2.x, 3.x; VictoriaMetrics."""

    def __init__(self, url: str, bucket: str, org: str, token: str | None, timeout: Seconds) -> None:
        client, write_options = _package()
        self._errors = _failures()
        self._bucket, self._org, self._secrets = bucket, org, _hidden(token)
        self._client = client(url=url.rstrip("/"), token=token, org=org, timeout=max(1, round(timeout * 1000)))
        self._writer = self._client.write_api(write_options=write_options)
        self.where = f"{url.rstrip('/')}/api/v2/write?bucket={bucket}" + (f"&org={org}" if org else "")

    def post(self, lines: bytes) -> Reply:
        try:
            self._writer.write(bucket=self._bucket, org=self._org, record=lines)
        except self._errors as error:
            status = getattr(error, "status", None)
            if not status:
                return Reply(None, _why(error))
            headers = getattr(error, "headers", None) or {}
            said = _said(getattr(error, "body", None) or b"", self._secrets)
            return Reply(int(status), said, _seconds(headers.get("Retry-After")))
        return Reply(204)

    def close(self) -> None:
        self._client.close()


def _package() -> tuple[Any, Any]:
    try:
        from influxdb_client.client.influxdb_client import InfluxDBClient
        from influxdb_client.client.write_api import SYNCHRONOUS
    except ImportError:
        raise ValueError(
            "mode v2 writes through the package influxdb-client, which is not installed: pip install -e '.[influx]' "
            "(mode v1 needs no package; InfluxDB 1.x and VictoriaMetrics take it)"
        ) from None
    return InfluxDBClient, SYNCHRONOUS


def _failures() -> tuple[type[Exception], ...]:
    from influxdb_client.rest import ApiException
    from urllib3.exceptions import HTTPError

    return ApiException, HTTPError, OSError


def _why(error: Exception) -> str:
    """An error of the network for people; urllib3 puts the address of its connection object before what happened."""
    return str(error).rpartition(">: ")[2].rpartition("object at 0x")[2].strip() or type(error).__name__


def _hidden(token: str | None) -> list[str]:
    """What of a token no answer may repeat into our files: all of it, a login's password, and the form in which that is sent."""
    if not token:
        return []
    password = token.partition(":")[2]
    coded = base64.b64encode(token.encode()).decode()
    return [text for text in (token, coded, coded.rstrip("="), password) if len(text) > 2]


def _said(body: bytes | str, secrets: Sequence[str]) -> str:
    """What an answer says is wrong, on one line, without our token where it repeats that."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    try:
        found = json.loads(text)
        text = str(found.get("error") or found.get("message") or text) if isinstance(found, dict) else text
    except ValueError:
        pass  # not JSON: the text itself
    text = " ".join(text.split())
    for secret in secrets:
        text = text.replace(secret, "***")
    return text if len(text) <= _SAID else f"{text[:_SAID]}…"


def _seconds(retry_after: str | None) -> Seconds | None:
    """Seconds, or a date; at most PATIENCE. None where it is neither."""
    if retry_after is None:
        return None
    try:
        wait = float(retry_after)
    except ValueError:
        try:
            wait = (parsedate_to_datetime(retry_after) - datetime.fromtimestamp(wall_time(), UTC)).total_seconds()
        except (TypeError, ValueError):
            return None
    return max(0.0, min(wait, PATIENCE)) if wait == wait else None

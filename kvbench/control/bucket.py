"""A token bucket of fixed rate and burst: the gate's own, filled by nobody's decision."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvbench.control.law import Open
from kvbench.core import Limits
from kvbench.units import Rate


class Bucket(Open):
    """A token bucket: at most `rate` requests a second after a first `burst`."""

    rate: Rate = Field(description="tokens gained a second")
    burst: Annotated[float, Field(ge=1, le=1e9)] = Field(1.0, description="tokens the bucket holds")
    example: ClassVar[dict[str, Any]] = {"rate": "5/s"}

    def limits(self, rate: float | None = None, burst: float | None = None) -> Limits:
        return super().limits(self.rate if rate is None else rate, self.burst if burst is None else burst)

"""What the usual mistakes in KV-cache arithmetic would give for a model, and what a total that somebody reports implies."""

from collections.abc import Iterator
from typing import NamedTuple

from kvbench.plan.size import Sized
from kvbench.shape import Model


class Mistake(NamedTuple):
    """`unit`: "B/token" (all devices), "B/token/device", "B" (of one request on one device) or "tokens"."""

    key: str
    what: str
    wrong: float
    right: float
    unit: str


class Reading(NamedTuple):
    """An assumption under which a reported total comes out: `each` tokens per request (token-seconds, where a rate was given)."""

    what: str
    token_bytes: float
    each: float


def mistakes(sized: Sized) -> list[Mistake]:
    """Those that would change this model's numbers on these devices."""
    found = [*_per_token(sized.model), *_split(sized), *_blocks(sized)]
    return [one for one in found if abs(one.wrong - one.right) > 1e-9 * abs(one.right)]


def _per_token(model: Model) -> Iterator[Mistake]:
    right, unit = model.kv_token_bytes(), "B/token"
    if not right:
        return
    bits = 8 * model.kv_bytes
    if model.latent is not None:
        yield Mistake(
            "latent_twice", "keys and values counted apart: a latent holds both, there is no factor 2", 2 * right, right, unit
        )
        wrong = 2 * model.layers * model.heads * model.head_dim * model.kv_bytes
        yield Mistake("latent_heads", "kv_heads x head_dim, as if the heads themselves were cached", wrong, right, unit)
    else:
        wrong = 2 * model.layers * model.hidden * model.kv_bytes
        yield Mistake("hidden", "hidden_size in place of kv_heads x head_dim", wrong, right, unit)
        yield Mistake("one_of_two", "keys or values forgotten: both are cached", right / 2, right, unit)
        what = f"all three: layers x hidden_size x {bits:g}, bits for bytes and one of K and V (vllm#22291)"
        yield Mistake("all_three", what, model.layers * model.hidden * bits, right, unit)
    if any(part.kind == "linear" for part in model.kept()):
        wrong = model.layers * max(part.token for part in model.kept())
        yield Mistake("linear", "linear layers counted as if they cached every token: they keep one state", wrong, right, unit)
    yield Mistake("bits", f"{bits:g} bits taken for {bits:g} bytes", 8 * right, right, unit)


def _split(sized: Sized) -> Iterator[Mistake]:
    model, count = sized.model, sized.hardware.count
    wrong, right = model.kv_token_bytes() / count, model.kv_token_bytes(count)
    if model.latent is not None:
        what = f"divided by {count} devices: each of them holds the whole latent"
    else:
        what = f"divided by {count} devices: KV heads fewer than devices are copied"
    yield Mistake("tensor_parallel", what, wrong, right, "B/token/device")


def _blocks(sized: Sized) -> Iterator[Mistake]:
    model, count, length = sized.model, sized.hardware.count, sized.length
    right = sized.request_blocks * sized.layout.block_bytes
    kept = model.kept(count)
    if any(part.kind == "window" for part in kept):
        wrong = sum(part.layers * (part.token * min(part.window or length, length) + part.state) for part in kept)
        what = "windows counted as min(window, length): a step in flight and a block's edge come on top (hf-mem#70)"
        yield Mistake("window", f"{what}, a request of {length:,} tokens", wrong, right, "B")
        wrong = length * model.kv_token_bytes(count)
        yield Mistake("all_full", f"windows counted as full attention, a request of {length:,} tokens", wrong, right, "B")
    if len(sized.layout.groups) > 1:
        wrong = float(sized.blocks * min(group.block for group in sized.layout.groups))
        what = "blocks x block size: a block holds the tokens of one group of layers alone (vllm#42206)"
        yield Mistake("block_product", what, wrong, sized.tokens, "tokens")


def readings(model: Model, total: float, requests: float) -> list[Reading]:
    """What `total` bytes of KV cache over all devices mean for each of `requests` at once, under assumptions in use."""
    right = model.kv_token_bytes()
    found = {f"as the model is, {8 * model.kv_bytes:g}-bit": right, "keys or values alone": right / 2}
    found |= {f"{8 * wide}-bit cache": right / model.kv_bytes * wide for wide in (1, 2, 4) if wide != model.kv_bytes}
    found["every attention head cached (multi-head)"] = 2 * model.layers * model.heads * model.head_dim * model.kv_bytes
    found["hidden_size in place of kv_heads x head_dim"] = 2 * model.layers * model.hidden * model.kv_bytes
    if model.latent is not None:
        del found["keys or values alone"]
    seen: dict[float, str] = {}
    for what, token in found.items():
        seen.setdefault(token, what)
    return [Reading(what, token, total / requests / token) for token, what in seen.items() if token]

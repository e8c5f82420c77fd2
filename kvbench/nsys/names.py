"""Which layer of a model a range is about, by its name.

Two styles (facts of vLLM's --enable-layerwise-nvtx-tracing and SGLang's --enable-layerwise-nvtx-marker): `DecoderLayer_18`, and
str() of a dict, {'Module': 'model.layers.18.self_attn', 'Inputs': ...}. vLLM's hooks push a second, short range after each
module, with the same name and 'Outputs' in place of 'Inputs'; around what is compiled the pair is named (input) and (output).
"""

import ast
import re
from typing import NamedTuple

_LONGEST = 20_000  # characters of a dict that are parsed; longer ones are searched
_MODULE = re.compile(r"""\{\s*['"]Module['"]\s*:\s*['"]([^'"]{0,2000})['"]""")
_LAYER = re.compile(r"DecoderLayer_([0-9]{1,6})(?![0-9])|(?:^|\.)layers\.([0-9]{1,6})(?=\.|$|\s)")
_OUTPUTS = re.compile(r"""['"]Outputs['"]\s*:""")
_TWIN = "(output)"


class Place(NamedTuple):
    """A place in a model. stack: the layers it is one of (a model may have several, of a vision tower say); part: what of the
    layer, "" for all of it."""

    stack: str
    layer: int
    part: str


class Told(NamedTuple):
    """What a range's name says. twin: the second range of a module, about its output; the first has its time."""

    module: str
    place: Place | None
    twin: bool


def told(text: str) -> Told:
    """What a range's text says of the layer that it is about."""
    name, of_output = _module(text)
    twin = of_output or _TWIN in name
    return Told(name, None if twin else place(name), twin)


def _module(text: str) -> tuple[str, bool]:
    """(the module a range is named after: the dict's Module, or the text as it is; does the dict tell of outputs?)."""
    if not text.startswith("{"):
        return text.strip(), False
    if len(text) <= _LONGEST:
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            found = None
        if isinstance(found, dict) and isinstance(found.get("Module"), str):
            return str(found["Module"]).strip(), "Outputs" in found
    match = _MODULE.match(text)
    return (match.group(1).strip(), _OUTPUTS.search(text) is not None) if match else (text.strip(), False)


def place(module: str) -> Place | None:
    """The layer a module lies in, None where its name says none."""
    match = _LAYER.search(module)
    if match is None:
        return None
    numbered = match.group(1) or match.group(2)
    stack = module[: match.start(1 if match.group(1) else 2)].rstrip("._")
    rest = module[match.end() :]
    return Place(stack, int(numbered), rest.lstrip("./:") if rest[:1] in tuple("./:") else "")

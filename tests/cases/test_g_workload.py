"""Group G of the cases: what the workload itself sends, against a prefix cache of 16-token blocks that remembers everything."""

from pathlib import Path

import numpy as np

from kvbench.core import Message, Record, Request
from kvbench.workload.mix import Class, Mix
from kvbench.workload.tokenizers import File, Ids, Words

BLOCK = 16
TOKENIZER = Path(__file__).parents[1] / "data" / "tokenizer" / "tokenizer.json"


class PrefixCache:
    """A server's prefix cache of endless size: full blocks, each known by everything up to its end."""

    def __init__(self) -> None:
        self.known: set[tuple[object, ...]] = set()

    def hits(self, prompt: list[object]) -> int:
        """Tokens found of `prompt`, which is known from now on."""
        blocks = [tuple(prompt[: end + BLOCK]) for end in range(0, len(prompt) - BLOCK + 1, BLOCK)]
        found = sum(block in self.known for block in blocks) * BLOCK
        self.known.update(blocks)
        return found


def prompt(request: Request, tokenizer: Ids | Words) -> list[object]:
    rendered = tokenizer.render(request)
    return list(rendered["prompt"]) if "prompt" in rendered else rendered["messages"][0]["content"].split()


def seeds() -> dict[str, np.random.SeedSequence]:
    return dict(zip(("lengths", "prompts", "sampling"), np.random.SeedSequence(7).spawn(3), strict=True))


def mix(spec: Class, nonce: int | None, stream: str = "steady", shared: str | None = None) -> Mix:
    return Mix({"default": spec}, seeds(), nonce, stream=stream, shared=shared)


UNIQUE = Class.model_validate({"prompt": {"dist": "uniform", "min": 40, "max": 400}, "output": 8})
GROUPED = Class.model_validate({"prompt": 40, "output": 8, "prefixes": {"groups": 4, "tokens": 160}})


def test_g01_each_run_begins_with_its_own_nonce() -> None:
    for tokenizer in (Ids(), Words()):
        cache = PrefixCache()
        for nonce in (101, 102, 103):  # three runs, or three points of a sweep, with one seed
            source = mix(UNIQUE, nonce)
            assert sum(cache.hits(prompt(source.next(0.0), tokenizer)) for _ in range(50)) == 0


def test_g01_the_same_nonce_on_purpose_warms_the_next_run() -> None:
    cache, source, again = PrefixCache(), mix(UNIQUE, None), mix(UNIQUE, None)
    first = [prompt(source.next(0.0), Ids()) for _ in range(50)]
    second = [prompt(again.next(0.0), Ids()) for _ in range(50)]
    assert first == second
    assert sum(map(cache.hits, first)) == 0
    assert sum(map(cache.hits, second)) == sum(len(p) // BLOCK * BLOCK for p in second)


def test_g01_the_nonce_keeps_what_is_shared_on_purpose() -> None:
    cache, source, hits, seen = PrefixCache(), mix(GROUPED, 101), 0, set()
    for _ in range(100):
        request = source.next(0.0)
        found = cache.hits(prompt(request, Ids()))
        assert found == (160 if request.group in seen else 0), "the whole prefix, and nothing more"
        seen.add(request.group)
        hits += found
    assert hits == (100 - 4) * 160


def test_g03_warm_up_sends_no_measured_prompt() -> None:
    for spec in (UNIQUE, GROUPED):
        for nonce in (5, None):
            cache, warm, steady = PrefixCache(), mix(spec, nonce, "warmup"), mix(spec, nonce)
            for _ in range(50):
                cache.hits(prompt(warm.next(0.0), Ids()))
            seen: set[int | None] = set()
            for request in (steady.next(0.0) for _ in range(5)):
                if request.group is None or request.group not in seen:
                    assert cache.hits(prompt(request, Ids())) == 0
                seen.add(request.group)


def test_g03_warm_up_may_share_prefixes_but_never_a_whole_prompt() -> None:
    cache, warm, steady = PrefixCache(), mix(GROUPED, 5, "warmup", shared="steady"), mix(GROUPED, 5)
    for _ in range(50):
        cache.hits(prompt(warm.next(0.0), Ids()))
    assert [cache.hits(prompt(steady.next(0.0), Ids())) for _ in range(50)] == [160] * 50


def test_g03_real_prompts_of_a_warm_up_are_not_those_measured(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "' + "a long question " * 40 + '"}\n')
    spec = Class.model_validate({"source": {"file": tmp_path / "p.jsonl"}, "output": 8})
    for nonce in (5, None):
        texts = [mix(spec, nonce, stream).next(0.0).messages[0].text for stream in ("warmup", "steady")]
        assert texts[0] is not None
        assert texts[1] is not None
        assert texts[0][:8] != texts[1][:8]


def test_g04_length_is_asked_of_the_text_or_of_the_server() -> None:
    template = 21  # what the server's chat template adds
    request = mix(Class.model_validate({"prompt": 256, "output": 8}), 1).next(0.0)
    assert request.tokens == 256
    plain, aimed = File(TOKENIZER), File(TOKENIZER, aim="server", overhead=template)
    served = [t.count(t.render(request)["messages"][0]["content"]) + template for t in (plain, aimed)]
    assert served == [277, 256]
    assert (aimed.facts()["aim"], aimed.facts()["overhead"]) == ("server", 21)


def test_g06_history_holds_the_answer_without_its_reasoning() -> None:
    spec = Class.model_validate({"prompt": 20, "output": 8, "sessions": {"turns": 2}})
    source = mix(spec, 1)
    first = source.next(0.0)
    record = Record(id=first.id, outcome="ok", text="answer", n_in=20, n_out=9, reasoning=8)  # R("think") C("answer")
    follow = source.follow(first, record)
    assert follow is not None
    assert follow[1].messages[1] == Message(role="assistant", text="answer")
    sent = Words().render(follow[1])["messages"]
    assert sent[1] == {"role": "assistant", "content": "answer"}
    assert "think" not in str(sent)

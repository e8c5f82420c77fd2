"""Tiers under the device: when blocks come up, what goes down. By hand on a device where every step takes one second, with blocks
of four tokens and lines that carry so many of them a second."""

import math
import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvbench.engine import Job
from kvbench.engine.admission import Admission, Everything, Frequency, Presence
from kvbench.engine.engine import Engine
from kvbench.engine.evict.order import Lru
from kvbench.engine.groups import LayersSpec
from kvbench.engine.hierarchy import Hierarchy, Rules
from kvbench.engine.level import Level, across, dwpd, eta, life_years
from kvbench.engine.stack import Stack
from kvbench.engine.store import Line
from kvbench.engine.tape import Access, Tape
from kvbench.engine.tiers import TiersSpec, build_below, computing
from kvbench.profile import Tier, load_engine, load_hardware, load_model
from tests.engine.test_engine import Log, Second

BLOCK = 4 * 131072.0  # bytes of four tokens of Llama-3.1-8B
S = 10**9


def tier(name: str, read: float = math.inf, write: float = math.inf, endurance: float | None = None) -> Tier:
    """Rates in blocks/s."""
    fields = {"name": name, "source": "test", "latency": 0.0, "energy": 0.0, "capacity": 100 * BLOCK, "endurance": endurance}
    return Tier.model_construct(**fields, read=read * BLOCK, write=write * BLOCK)


def tiers(
    *levels: tuple[str, int, float, float], link: float = math.inf, admission: Admission | None = None, backlog: float = math.inf,
    persist: int | None = None, tape: Tape | None = None, per_token: float = 1.0, **rules: object,
) -> Hierarchy:  # fmt: skip
    """(name, blocks, blocks/s out, blocks/s in) of each level; `per_token` seconds to compute a token."""
    said = Rules(
        **{"write": "write_back", "restore": "always", "spill": "recompute", "sequences": "delta", "prefetch": 0, **rules}
    )
    built = [
        Level(
            name,
            tier(name, out, into),
            room * BLOCK,
            Lru(room, 0),
            backlog * BLOCK,
            name == "host" and said.write != "write_through",
        )
        for name, room, out, into in levels
    ]
    stack = Stack(built, said.write == "write_through", admission or Everything(), persist, tape)
    line = link * BLOCK
    return Hierarchy(stack, said, Line(line), Line(line), 1.0, lambda before, tokens: per_token * tokens)


def engine(below: Hierarchy | None, blocks: int = 4, tape: Tape | None = None, **overrides: object) -> Engine:
    """`blocks` are usable."""
    profile = load_engine("vllm", block=4, blocks=blocks + 1, **overrides)
    built = Engine(load_model("llama-3.1-8b"), load_hardware("rtx-4090"), profile, tape=tape, below=below)
    built.cost = Second()
    return built


def job(number: int, *segments: tuple[int, int], answer: int = 1) -> Job:
    return Job(number, segments, answer)


def serve(built: Engine, *jobs: tuple[float, Job]) -> Log:
    """Submit each at its time and run to the end."""
    log = Log()
    for at, one in jobs:
        log.take(built.advance(at))
        assert built.submit(one, at) is None
    return log.run(built)


A, B = 101, 102


def evicted(below: Hierarchy, **overrides: object) -> Engine:
    """A's two blocks have been on the device, then four of B: A's went down where they may."""
    built = engine(below, **overrides)
    serve(built, (0.0, job(0, (A, 8))), (2.0, job(1, (B, 16))))
    return built


def test_blocks_over_two_lines_follow_each_other() -> None:
    """Four blocks of 10 bytes over 10 and 20 bytes/s, 0.25 s of latency each: 4 x 1 + 0.25 + 0.5 + 0.25 s; the other way round
    0.5 + 0.25 + 4 x 1 + 0.25. A second transfer begins when the first has left: 4 s later."""
    slow, quick = Line(10, 0.25), Line(20, 0.25)
    assert eta([slow, quick], 40, 10, 0) == eta([quick, slow], 40, 10, 0) == 5 * S
    assert across([slow, quick], 40, 10, 0) == 5 * S
    assert across([slow, quick], 40, 10, 0) == 9 * S
    assert slow.carried == quick.carried == 80
    assert eta([quick], 20, 10, 100 * S) == 101.25 * S


def test_what_left_the_device_comes_up_again_and_its_request_waits_for_it() -> None:
    """Two blocks out of memory at 10 blocks/s, over a link of 20: 2 / 10 + 1 / 20 s, then the step of a second."""
    below = tiers(("host", 10, 10, 100), link=20)
    built = evicted(below)
    assert [level.used for level in below.levels] == [2 * BLOCK]
    log = serve(built, (10.0, job(2, (A, 8), (103, 4))))
    assert log.seconds(2) == [11.25]
    assert log.done[2].cached == 8
    assert built.batch.counters.below == 8
    gauges = built.gauges()
    assert gauges["hit_tokens_host"] == 8
    assert gauges["tier_host_read_bytes"] == 2 * BLOCK
    assert gauges["recompute_tokens"] == 0


def test_a_decoding_request_goes_on_while_another_loads() -> None:
    below = tiers(("host", 10, 1, 100))
    built = evicted(below, blocks=6)  # B's four blocks and the two of A fit: C of three pushes A out
    serve(built, (5.0, job(2, (104, 24))))
    log = serve(built, (10.0, job(3, (105, 4), answer=6)), (10.0, job(4, (A, 8), (103, 4))))
    assert log.seconds(3) == [11, 12, 13, 14, 15, 16]
    assert log.seconds(4) == [13]  # there at 12, when a step begins


def test_a_block_that_is_being_loaded_is_waited_for_and_read_once() -> None:
    below = tiers(("host", 10, 1, 100))
    built = evicted(below)
    log = serve(built, (10.0, job(2, (A, 8), (103, 4))), (10.5, job(3, (A, 8), (104, 4))))
    assert log.seconds(2) == [13]
    assert log.seconds(3) == [13]
    assert below.levels[0].reads.carried == 2 * BLOCK
    assert log.done[3].cached == 8  # on the device by then: no hit of a tier
    assert built.gauges()["hit_tokens_host"] == 8


def test_loads_share_a_line_in_the_order_in_which_they_were_asked_for() -> None:
    below = tiers(("host", 20, 1, 100))
    built = engine(below, blocks=8)
    serve(built, (0.0, job(0, (A, 8))), (2.0, job(1, (B, 8))), (4.0, job(2, (103, 32))))
    log = serve(built, (10.0, job(3, (A, 8), (104, 4))), (10.0, job(4, (B, 8), (104, 4))))
    assert (log.seconds(3), log.seconds(4)) == ([13], [15])  # there at 12 and 14


def test_a_write_in_progress_is_loaded_only_after_it() -> None:
    """A's blocks go down from 2 s on at one block a second: there at 3 and 4. Back at 10 blocks/s: the last one 0.1 s later."""
    below = tiers(("host", 10, 10, 1))
    built = engine(below, blocks=4)
    log = serve(built, (0.0, job(0, (A, 8))), (2.0, job(1, (B, 16))), (2.5, job(2, (A, 8), (103, 4))))
    assert log.seconds(2) == [5.1]  # the step of B ends at 3


def test_write_back_moves_and_write_through_copies() -> None:
    """A: 2 blocks, B: 4, A and one more: 3. Through: 2 + 4 + 1. Back: A's two when B came, and two of B's when A came back; the
    third block of the last request took the place of a third one."""
    through, back = tiers(("host", 10, 99, 99), write="write_through"), tiers(("host", 10, 99, 99))
    for below in (through, back):
        built = evicted(below)
        serve(built, (10.0, job(2, (A, 8), (103, 4))))
    assert through.levels[0].writes.carried == 7 * BLOCK
    assert through.levels[0].used == 7 * BLOCK
    assert back.levels[0].writes.carried == 5 * BLOCK
    assert back.levels[0].used == 3 * BLOCK  # A's two are on the device again, and nowhere else


def test_under_write_through_every_tier_holds_what_the_tiers_above_hold() -> None:
    below = tiers(("host", 4, 99, 99), ("ssd", 10, 99, 99), write="write_through")
    built = evicted(below)
    host, ssd = below.levels
    assert set(below.stack.device) <= set(host.index) <= set(ssd.index)
    assert (len(host.index), len(ssd.index)) == (4, 6)
    log = serve(built, (10.0, job(2, (A, 8), (103, 4))))  # A comes from the drive, and is in memory again
    assert log.done[2].cached == 8
    assert set(below.stack.device) <= set(host.index) <= set(ssd.index)
    assert built.gauges()["hit_tokens_ssd"] == 8
    assert ssd.writes.carried == 7 * BLOCK  # what came from it was not written again


def test_write_back_goes_down_tier_by_tier_and_leaves_the_last() -> None:
    rows: list[Access] = []
    tape = Tape()
    tape.listeners.append(rows.append)
    below = tiers(("host", 2, 99, 99), ("ssd", 3, 99, 99), tape=tape)
    built = engine(below, tape=tape)
    serve(built, *((3.0 * number, job(number, (200 + number, 16))) for number in range(4)))
    host, ssd = below.levels
    assert (len(host.index), len(ssd.index)) == (2, 3)
    assert [row.op for row in rows if row.tier == "host"] == ["spill"] * 12
    assert [row.op for row in rows if row.tier == "ssd"].count("spill") == 10
    assert [row.op for row in rows if row.tier == "ssd"].count("evict") == 7


def test_selective_writes_what_was_used_often_enough() -> None:
    never = tiers(("host", 10, 99, 99), write="selective", admission=Frequency(2, S * 1000))
    assert not evicted(never).gauges()["tier_host_written_bytes"]
    twice = tiers(("host", 10, 99, 99), write="selective", admission=Frequency(2, S * 1000))
    built = engine(twice)
    serve(built, (0.0, job(0, (A, 8))), (2.0, job(1, (A, 8), (103, 4))), (4.0, job(2, (B, 16))))
    assert twice.levels[0].used == 2 * BLOCK  # of A's the two that were found, not the third


def test_a_frequency_begins_at_1_doubles_and_falls_by_1() -> None:
    filter_ = Frequency(4, 10)
    for now, admitted in ((0, False), (1, False), (2, True)):  # 1, 2, 4
        filter_.seen(7, now)
        assert filter_.admits(7, now) is admitted
    assert not filter_.admits(7, 10)  # 3
    filter_.seen(7, 10)  # 6
    assert filter_.admits(7, 30)  # 4
    assert not filter_.admits(7, 40)
    assert not filter_.admits(8, 0)
    filter_.seen(7, 1000)  # forgotten: 1 again
    assert not filter_.admits(7, 1000)


def test_presence_admits_the_second_use() -> None:
    filter_ = Presence()
    filter_.seen(7, 0)
    assert not filter_.admits(7, 0)
    filter_.seen(7, 10**15)
    assert filter_.admits(7, 10**15)


def test_a_full_queue_drops_writes_and_counts_them() -> None:
    """One block a second goes down, two may wait: of B's four that leave at once the first begins, two wait, one is dropped."""
    below = tiers(("host", 20, 9, 1), backlog=2)
    built = engine(below)
    serve(built, (0.0, job(0, (A, 16))), (2.0, job(1, (B, 16))))
    assert built.gauges()["tier_host_dropped"] == 1
    assert built.gauges()["tier_host_written_bytes"] == 3 * BLOCK
    built.advance(4.0)
    assert built.gauges()["tier_host_queue"] == pytest.approx(1.0)  # three seconds of writing from 2 s on


def test_cheaper_restores_only_what_computing_would_not_beat() -> None:
    """Two blocks are eight tokens: at 0.1 s each 0.8 s. From memory at 4 blocks/s they take 0.5 s, at 2 blocks/s a second."""
    for rate, cached in ((4, 8), (2, 0)):
        built = evicted(tiers(("host", 10, rate, 99), restore="cheaper", per_token=0.1))
        assert serve(built, (10.0, job(2, (A, 8), (103, 4)))).done[2].cached == cached


def test_cheaper_takes_the_quick_part_and_leaves_the_slow_one() -> None:
    """Device of four blocks, memory of two. B's three push A's third and second out, two more push A's first and B's third:
    memory holds the last two, and the drive, which needs 5 s for a block, A's second and third."""
    for restore, cached in (("always", 12), ("cheaper", 4)):
        below = tiers(("host", 2, 99, 99), ("ssd", 9, 0.2, 99), restore=restore, per_token=0.1)
        built = engine(below)
        serve(built, (0.0, job(0, (A, 12))), (2.0, job(1, (B, 12))), (4.0, job(2, (104, 8))))
        assert [len(level.index) for level in below.levels] == [2, 2]
        assert serve(built, (20.0, job(3, (A, 12), (103, 1)))).done[3].cached == cached
        assert built.gauges()["tier_ssd_read_bytes"] == (cached - 4) / 4 * BLOCK


def test_waiting_requests_have_their_blocks_brought_nearer() -> None:
    """The drive gives 1 block/s, memory 100. A running request holds the only place until 13; the waiting one's two blocks are in
    memory by 12."""
    for prefetch, token in ((0, 16.0), (1, 14.02)):
        below = tiers(("host", 6, 100, 100), ("ssd", 9, 1, 99), prefetch=prefetch)
        built = engine(below, max_num_seqs=1)
        serve(built, (0.0, job(0, (A, 8))), (2.0, job(1, (B, 16))), (4.0, job(2, (103, 16))), (6.0, job(3, (104, 16))))
        assert [key in below.levels[1].index for key in built.cache.open(((A, 8),), 0).tables[0].chain.upto(2)] == [True, True]
        log = serve(built, (10.0, job(4, (105, 4), answer=3)), (10.0, job(5, (A, 8), (106, 4))))
        assert log.seconds(5) == [token]


def test_cold_blocks_are_persisted_when_they_have_been_idle_and_cost_nothing_when_they_leave() -> None:
    """At 2 s A's two blocks go down, at 20 and 40 s one of B's each; A's are written at 32. At 41 four blocks leave the device:
    A's make room for two of them at no cost, B's, idle for 21 s at most, have to be written for the others."""
    below = tiers(("host", 4, 99, 99), ("ssd", 9, 99, 99), persist=30 * S)
    built, ssd = evicted(below), below.levels[1]
    serve(built, (20.0, job(2, (103, 4))))
    assert ssd.writes.carried == 0
    serve(built, (40.0, job(3, (104, 4))))  # the next time that anybody looks
    assert ssd.writes.carried == 2 * BLOCK
    assert ssd.writes.free == pytest.approx((32 + 2 / 99) * S)
    serve(built, (41.0, job(4, (105, 16))))
    assert ssd.writes.carried == ssd.used == 4 * BLOCK
    assert below.levels[0].used == 4 * BLOCK


@pytest.mark.parametrize(("rate", "swapped"), [(1.0, True), (0.5, False)])
def test_a_preempted_request_is_swapped_where_that_is_quicker(rate: float, swapped: bool) -> None:
    """Two requests of 8 tokens in 4 blocks: with the ninth token the later one has to go. Its 8 tokens take 5 s to compute; its
    two blocks go down and come up in 2 x 2 / rate: 4 s or 8 s."""
    below = tiers(("host", 9, rate, rate), spill="cheaper", per_token=5 / 8, write="selective", admission=Frequency(9, S))
    built = engine(below)
    log = serve(built, (0.0, job(0, (A, 8), answer=4)), (0.0, job(1, (B, 8), answer=4)))
    assert log.done[1].preempted == 1
    assert built.gauges()["swapped_blocks"] == (2 if swapped else 0)
    assert built.gauges()["recompute_tokens"] == (0 if swapped else 4)  # its first block was still on the device
    assert below.levels[0].hits == 0  # a second admission


def test_swapped_tokens_are_not_recomputed() -> None:
    for spill, again in (("swap", 0), ("recompute", 8)):
        below = tiers(("host", 9, 99, 99), spill=spill, write="selective", admission=Frequency(9, S))
        built = engine(below)
        serve(built, (0.0, job(0, (A, 8), answer=9)), (0.0, job(1, (B, 8), answer=4)))
        assert built.gauges()["recompute_tokens"] == again


def test_delta_writes_save_what_a_rewrite_of_whole_sequences_would_write_again() -> None:
    """Three turns of 2, 4 and 6 blocks: 12 blocks if each is written whole, 6 as they are new. Saving 50 %, the hit rate."""
    turns = [job(0, (A, 8)), job(1, (A, 16)), job(2, (A, 24))]
    for sequences, written, saving in (("delta", 6, 0.5), ("whole", 12, 0.0)):
        below = tiers(("ssd", 20, 99, 99), write="write_through", sequences=sequences)
        built = engine(below, blocks=8)
        serve(built, *((2.0 * turn.id, turn) for turn in turns))
        assert below.levels[0].writes.carried == written * BLOCK
        assert built.gauges()["delta_saving"] == saving


def test_wear_by_hand() -> None:
    """A drive of 1 TB that takes 2 TB in 12 hours is written 4 times a day; rated for 2 over five years it lasts half of them."""
    assert dwpd(2e12, 1e12, 43200) == 4
    assert life_years(4, 2) == 2.5
    below = tiers(("ssd", 10, 99, 99), write="write_through")
    below.levels[0].drive = tier("ssd", endurance=2.0)
    built = engine(below)
    serve(built, (0.0, job(0, (A, 16))))
    built.advance(8640.0)  # a tenth of a day; the drive has 100 blocks
    assert built.gauges()["ssd_dwpd"] == pytest.approx(0.4)
    assert built.gauges()["ssd_life_years"] == pytest.approx(25)


def test_a_slow_tier_is_slow_from_then_on() -> None:
    below = tiers(("host", 10, 10, 100))
    built = evicted(below)
    below.slow("host", 5)
    assert serve(built, (10.0, job(2, (A, 8), (103, 4)))).seconds(2) == [12.0]  # 2 blocks at 2/s
    below.fast("host", 5)
    assert below.levels[0].reads.bandwidth == pytest.approx(10 * BLOCK)


def test_a_reset_empties_every_tier() -> None:
    below = tiers(("host", 10, 99, 99), ("ssd", 10, 99, 99), write="write_through")
    built = evicted(below)
    assert built.reset(9.0)
    assert [level.used for level in below.levels] == [0, 0]
    assert serve(built, (10.0, job(2, (A, 8), (103, 4)))).done[2].cached == 0


def load(seed: int, count: int, groups: int = 6) -> list[tuple[float, Job]]:
    """Sessions-like jobs: a shared beginning, a part of their own."""
    rng = random.Random(seed)
    at, found = 0.0, []
    for number in range(count):
        at += rng.expovariate(0.5)
        group = rng.randrange(groups)
        segments = ((1000 + group, rng.randint(1, 40)), (2000 + number, rng.randint(1, 12)))
        found.append((at, Job(number, segments, rng.randint(1, 12), n=rng.choice((1, 1, 1, 2)))))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_tiers_without_room_change_nothing(seed: int) -> None:
    model, hardware, profile = load_model("llama-3.1-8b"), load_hardware("rtx-4090"), load_engine("vllm", block=4, blocks=20)
    spec = TiersSpec.model_validate({"host": {"capacity": 0}, "ssd": {"capacity": 0}, "persist": 5, "prefetch": 3})
    runs = []
    for below in (None, build_below(spec, model, hardware, profile, lambda: 0)):
        built = Engine(model, hardware, profile, below=below)
        log = serve(built, *load(seed, 60))
        runs.append((log.times, log.done, built.gauges()))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("seed", range(3))
def test_memory_under_the_device_is_one_lru_of_the_summed_capacity(seed: int) -> None:
    """Exclusive, with lines that take no time: as many hits as one device with all the room, and as a bare LRU over blocks."""
    rng = random.Random(seed)
    jobs = [(20.0 * at, job(at, (1000 + rng.randrange(12), 4 * rng.randint(1, 8)), (5000 + at, 3))) for at in range(400)]
    split, one = engine(tiers(("host", 30, math.inf, math.inf)), blocks=20), engine(None, blocks=50)
    hits = []
    for built in (split, one):
        serve(built, *jobs)
        hits.append(built.batch.counters.hit)
    blocks: OrderedDict[tuple[int, int], None] = OrderedDict()
    model = 0
    for _, each in jobs:
        (content, tokens), _ = each.segments
        path = [(content, at) for at in range(tokens // 4)]
        found = next((at for at, key in enumerate(path) if key not in blocks), len(path))
        model += 4 * found
        for key in reversed(path):  # the tail is freed first
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > 50 - 1:  # the last, partial block takes a place and leaves nothing
            blocks.popitem(last=False)
    assert hits[0] == hits[1]
    assert hits[1] == pytest.approx(model, rel=0.02)
    assert split.batch.counters.below > 0.2 * hits[0]


SPECS = st.fixed_dictionaries(
    {
        "write": st.sampled_from(("write_through", "write_back", "selective")),
        "restore": st.sampled_from(("always", "cheaper")),
        "spill": st.sampled_from(("recompute", "swap", "cheaper")),
        "prefetch": st.integers(0, 3),
    }
)


@settings(max_examples=40, deadline=None)
@given(rules=SPECS, seed=st.integers(0, 10**6), host=st.integers(1, 40), rate=st.sampled_from((0.5, 5.0, math.inf)))
def test_invariants_hold_under_random_loads(rules: dict[str, object], seed: int, host: int, rate: float) -> None:
    """check() after every wake, drops counted, superset kept, everything served."""
    through = rules["write"] == "write_through"
    if through:
        host = max(host, 16)
    sizes = (("host", host, rate, rate), ("ssd", host + 20, rate, rate / 2))
    admission = Frequency(2, 5 * S) if rules["write"] == "selective" else None
    persist = None if through else 3 * S
    below = tiers(*sizes, link=rate, admission=admission, persist=persist, per_token=0.3, **rules)
    built = engine(below, blocks=16)
    log = Log()
    for at, one in load(seed, 25):
        log.take(built.advance(at))
        built.submit(one, at)
        built.check()
    log.run(built)
    assert len(log.done) == 25
    first, second = below.levels
    if through and not (first.dropped or second.dropped or first.forced):
        assert set(built.pool.index) <= set(first.index) <= set(second.index)
    assert built.batch.counters.below <= built.batch.counters.hit
    assert first.hits + second.hits <= built.batch.counters.hit + 1e-6


def test_a_run_repeats_to_the_byte() -> None:
    runs = []
    for _ in range(2):
        built = engine(tiers(("host", 20, 5, 5), ("ssd", 40, 1, 1), persist=9 * S, prefetch=2), blocks=16)
        log = serve(built, *load(5, 60))
        runs.append((log.times, log.done, built.gauges()))
    assert runs[0] == runs[1]


def test_computing_is_the_sum_of_its_steps() -> None:
    assert computing(Second(), 4)(0, 10) == 3.0


@pytest.mark.parametrize(
    ("group", "more"),  # seconds that 3,000 tokens take more than those of a model without groups
    [
        ({}, 0.0),
        ({"codec": "int4-g64"}, 3000 * 32 * 10e-9),  # the step that makes them encodes them: 10 ns a token and layer
        ({"codec": "int4-g64", "encoding": "async"}, 0.0),
    ],
)
def test_what_restore_saves_is_what_the_engine_would_take(group: dict[str, object], more: float) -> None:
    parts = load_model("llama-3.1-8b"), load_hardware("rtx-4090"), load_engine("vllm", blocks=1001, max_num_batched_tokens=4096)
    layers = LayersSpec.model_validate({"groups": [{"layers": "1+", **group}], "staging": 1e9})
    spec = TiersSpec.model_validate({"host": {"capacity": 1e9}, "restore": "cheaper"})
    below, bare = (build_below(spec, *parts, lambda: 0, layers=one) for one in (layers, None))
    assert below is not None and bare is not None  # noqa: PT018
    assert below._recompute(0, 3000) - bare._recompute(0, 3000) == pytest.approx(more, abs=1e-12)
    took = []
    for one in (layers, None):
        built = Engine(*parts, layers=one)
        took.append(serve(built, (0.0, job(0, (A, 3000)))).seconds(0)[0])
    assert took[0] - took[1] == pytest.approx(more, rel=0.01, abs=2e-9)  # 3,000 tokens are not whole blocks


def test_restore_reckons_with_kv_as_it_is_stored() -> None:
    """A late chunk of a prompt reads the KV of all tokens before it: 4.5 of 16 bits of each number."""
    model, card = load_model("llama-3.1-70b"), load_hardware("h100").model_copy(update={"bandwidth": 1e9})  # reading decides
    profile = load_engine("vllm", blocks=1001, max_num_batched_tokens=64, max_num_seqs=8)
    layers = LayersSpec.model_validate({"groups": [{"layers": "1+", "codec": "int4-g64", "encoding": "async"}]})
    spec = TiersSpec.model_validate({"host": {"capacity": 1e9}})
    below, bare = (build_below(spec, model, card, profile, lambda: 0, layers=one) for one in (layers, None))
    assert below is not None and bare is not None  # noqa: PT018
    seen = [one._recompute(8000, 64) - one._recompute(0, 64) for one in (below, bare)]
    assert seen[0] / seen[1] == pytest.approx(4.5 / 16)


def test_a_token_is_found_below_by_the_share_of_its_layers() -> None:
    """8 of 32 layers have left the device: of 60 tokens, 15 whole blocks of 4, 56 are common to all, a quarter of them below. One
    more block of theirs is no hit: the other layers never had more."""
    parts = load_model("llama-3.1-8b"), load_hardware("rtx-4090"), load_engine("vllm", block=4, blocks=401)
    layers = LayersSpec.model_validate({"groups": [{"layers": "1-8"}, {"layers": "9+"}]})
    spec = TiersSpec.model_validate({"host": {"capacity": 1e9}})
    built = Engine(*parts, below=build_below(spec, *parts, lambda: 0, layers=layers), layers=layers)
    serve(built, (0.0, job(0, (A, 61))))
    few, most = (group.pool for group in built.cache.groups)
    for key in list(few.index):
        few.evicted_to(key)
    few.discard(list(few.index))
    most.discard(list(most.index)[14:])
    serve(built, (built.until / 1e9, job(1, (A, 61))))
    gauges = built.gauges()
    assert (gauges["hit_tokens"], gauges["hit_tokens_host"]) == (56, 14)
    assert (gauges["hit_tokens_1_8"], gauges["hit_tokens_9_32"]) == (60, 56)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "names no tier"),
        ({"host": {"profile": "host-ddr"}}, "did you mean 'host-ddr5'"),
        ({"host": {"policy": "lrru"}}, "unknown"),
        ({"host": {}, "admit": "presence"}, "selective"),
        ({"host": {}, "sequences": "whole"}, "write_through"),
        ({"host": {}, "persist": 5}, "name another"),
        ({"ssd": {}, "remote": {}, "prefetch": 2}, "name `host`"),
        ({"host": {"capacity": 2**40}, "ssd": {"capacity": 2**30}, "write": "write_through"}, "give it more"),
        ({"ssd": {"real": "x"}}, "capacity"),
        ({"host": {}, "ssd": {}, "write": "write_through", "persist": 5}, "writes everything"),
    ],
)
def test_specs_that_mean_nothing_are_refused(spec: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TiersSpec.model_validate(spec)

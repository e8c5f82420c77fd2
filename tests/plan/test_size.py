"""What fits: vLLM's block counts to the digit, the usual mistakes, and the words of `kvbench size`."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvbench.cli import app
from kvbench.layout import layout
from kvbench.plan.mistakes import mistakes, readings
from kvbench.plan.size import Ask, Sized, lines
from kvbench.profile import load_engine, load_hardware, load_model
from kvbench.shape import Model

GIB = 2**30


def sized(model: str, hardware: str = "h100", given: float | None = None, length: int = 32_768, **settings: Any) -> Sized:
    engine = load_engine("vllm-large", **settings)
    return Sized(load_model(model), load_hardware(hardware), engine, length, engine.max_num_batched_tokens, given)


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["size", *words], env={"COLUMNS": "200"})


def test_recorded_vllm_on_rtx_4090() -> None:
    # vLLM 0.19 logged: 2,588 blocks, "GPU KV cache size: 41,408 tokens", "Maximum concurrency for 32,768 tokens ...: 1.26x".
    found = sized("llama-3.1-8b", "rtx-4090", blocks=2588)
    assert (found.blocks, found.tokens, f"{found.concurrency:.2f}") == (2588, 41_408, "1.26")


def test_room_of_a_measured_a100() -> None:
    # Llama-3-8B on an A100 of 80 GB at a utilization of 0.9: 55.1 GiB for KV were measured (notes of ridgepoint 0.1.2).
    values = {line.key: line.value for line in lines(sized("llama-3.1-8b", "a100-80gb", length=8192, gpu_memory_utilization=0.9))}
    assert values["room"] / GIB == pytest.approx(55.1, rel=0.02)


def test_gpt_oss_120b_as_vllm_counts_it() -> None:
    # Logged: 5.38 GiB for KV. Two groups of 18 layers: a block is 18 x 16 x 2 x 8 x 64 x 2 B = 589,824 B.
    found = sized("gpt-oss-120b", given=5.38 * GIB, length=131_072)
    assert found.layout.block_bytes == 589_824
    assert found.request_blocks == 8192 + 521  # ceil((127 + 8192) / 16) + 1 = 521
    assert (found.blocks, found.tokens, f"{found.concurrency:.2f}") == (9793, 147_318, "1.12")
    # What versions before it printed: blocks // groups x block size, within what 5.38 GiB leaves open of 78,384.
    assert found.blocks // 2 * 16 == pytest.approx(78_384, rel=0.001)


@pytest.mark.parametrize(("length", "concurrency"), [(8192, "9.13"), (32_768, "5.95"), (131_072, "2.81")])
def test_gemma_3_27b_as_vllm_counts_it(length: int, concurrency: str) -> None:
    # 10 full and 52 window layers: groups of 10, one full and six windows, 8 of 70 places empty.
    found = sized("gemma-3-27b", given=40 * GIB, length=length)
    assert (found.layout.block_bytes, found.blocks, f"{found.concurrency:.2f}") == (1_310_720, 32_768, concurrency)
    assert [group.kind for group in found.layout.groups].count("window") == 6
    assert (len(found.layout.groups), found.layout.width, found.layout.padded) == (7, 10, 8)
    assert sum(group.layers for group in found.layout.groups) == 62


def test_kinds_of_nearly_equal_count_are_padded_to_the_larger() -> None:
    # 24 layers, 14 and 10: 14 < 1.5 x 10, so both groups are 14 wide and 4 places stay empty.
    model = load_model("gpt-oss-20b")
    parts = [{"layers": 14, "kind": "window", "window": 128}, {"layers": 10}]
    uneven = Model.model_validate({**model.model_dump(), "kinds": parts})
    found = layout(uneven, 16)
    assert (found.width, len(found.groups), found.padded, found.block_bytes) == (14, 2, 4, 14 * 16 * 2048)
    parts = [{"layers": 15, "kind": "window", "window": 128}, {"layers": 9}]  # 15 >= 1.5 x 9
    found = layout(Model.model_validate({**model.model_dump(), "kinds": parts}), 16)
    assert (found.width, len(found.groups), found.padded) == (9, 3, 3)


def test_layers_of_different_width_get_blocks_of_equal_bytes() -> None:
    # Gemma-4-31B: 16,384 B a token in window layers, 8,192 B in global ones, so those hold 32 tokens where the others hold 16.
    found = layout(load_model("gemma-4-31b"), 16)
    assert [(group.layers, group.kind, group.block) for group in found.groups] == [(10, "window", 16)] * 5 + [(10, "full", 32)]
    assert found.block_bytes == 10 * 16 * 16_384


def test_blocks_grow_to_hold_a_linear_state() -> None:
    # Qwen3.5-27B: 3,207,168 B of state against 4,096 B a token: 783 tokens, 784 in sixteens. One block a sequence and group.
    found = layout(load_model("qwen3.5-27b"), 16)
    assert [(group.layers, group.kind, group.block) for group in found.groups] == [(16, "linear", 784)] * 3 + [(16, "full", 784)]
    assert found.block_bytes == 16 * 784 * 4096
    assert found.request_blocks(784 * 5, 8192) == 3 + 5


def test_a_model_of_windows_alone_is_one_group() -> None:
    model = Model.model_validate(
        {**load_model("llama-3.1-8b").model_dump(), "kinds": [{"layers": 32, "kind": "window", "window": 4096}]}
    )
    found = layout(model, 16)
    assert (len(found.groups), found.block_bytes) == (1, 16 * 131_072)
    assert found.request_blocks(131_072, 2048) == 384 + 1  # ceil((4095 + 2048) / 16) + 1
    assert found.request_blocks(100, 2048) == 7 + 1


def test_latent_blocks_are_whole_on_every_device() -> None:
    assert layout(load_model("deepseek-v3"), 16, 8).block_bytes == 16 * 70_272
    assert layout(load_model("llama-3.1-70b"), 16, 8).block_bytes == 16 * 40_960
    assert layout(load_model("llama-3.1-70b"), 16, 16).block_bytes == 16 * 40_960


def test_fits_and_what_would_do() -> None:
    # 131.4 GiB of weights: two H100 leave 73.6 - 65.7 - 2 GiB, 35,000 tokens each of 163,840 B; four are plenty.
    found = sized("llama-3.1-70b", "h100")
    assert (found.fits(), found.blocks, found.longest) == (False, 0, 0)
    assert found.enough() == 2
    assert sized("llama-3.1-70b", "h100 x2").fits()
    assert sized("llama-3.1-70b", "h100 x2", length=131_072).enough() == 4
    short = sized("llama-3.1-70b", "h100 x2", length=131_072)
    assert not short.fits()
    assert short.layout.request_blocks(short.longest, 8192) == short.blocks - 1  # one block is never used
    assert short.longest == (short.blocks - 1) * 16


def test_requests_that_are_asked_for() -> None:
    # 9,216 tokens are 576 blocks; 89,842 blocks of which one is never used: 155 such requests.
    found = sized("llama-3.1-70b", "h100 x8")
    assert (found.blocks, found.need(Ask(15, 8192, 1024)), found.holds(Ask(15, 8192, 1024))) == (89_842, 15 * 576, 155)
    assert found.fits(Ask(155, 8192, 1024))
    assert not found.fits(Ask(156, 8192, 1024))
    assert sized("llama-3.1-70b", "h100 x8", max_num_seqs=64).holds(Ask(1, 8192, 1024)) == 64
    assert found.enough(Ask(156, 8192, 1024)) == 16


def test_lines_add_up() -> None:
    values = {line.key: line.value for line in lines(sized("llama-3.1-70b", "h100 x8"))}
    assert values["usable"] - values["weights"] - values["activations"] - values["reserve"] == pytest.approx(values["room"])
    assert int(values["room"] // values["block_bytes"]) == values["blocks"]
    parts = [line.value for line in lines(sized("gemma-4-31b")) if line.key == "kind"]
    assert parts == [50 * 16_384, 10 * 8192]


def test_the_mistakes_of_qwen2_5_7b() -> None:
    # vllm#22291: 1.53 MB a token where it is 57,344 B: 28 x 3,584 x 16.
    found = {one.key: one for one in mistakes(sized("qwen2.5-7b"))}
    assert (found["all_three"].wrong, found["all_three"].right) == (1_605_632, 57_344)
    assert found["all_three"].wrong / 2**20 == pytest.approx(1.53, abs=0.005)
    assert found["hidden"].wrong == 401_408
    assert found["one_of_two"].wrong == 28_672
    assert found["bits"].wrong == 458_752
    assert set(found) == {"all_three", "hidden", "one_of_two", "bits"}  # one device, one kind of layers


def test_the_mistakes_of_windows() -> None:
    # hf-mem#70: gpt-oss-20b, 8,192 tokens x 32 requests: 6.09 GiB counted, 12.00 GiB taken.
    found = {one.key: one for one in mistakes(sized("gpt-oss-20b", length=8192))}
    assert 32 * found["window"].wrong / GIB == pytest.approx(6.09, abs=0.005)
    assert 32 * found["window"].right / GIB == pytest.approx(12.0, abs=0.02)
    # vllm#42206: blocks x block size is not the capacity of a hybrid.
    right = sized("gpt-oss-20b", length=8192)
    assert (found["block_product"].wrong, found["block_product"].right) == (right.blocks * 16, right.tokens)


def test_the_mistakes_of_tensor_parallel_and_latent() -> None:
    found = {one.key: one for one in mistakes(sized("llama-3.1-70b", "h100 x16"))}
    assert (found["tensor_parallel"].wrong, found["tensor_parallel"].right) == (20_480, 40_960)
    assert "tensor_parallel" not in {one.key for one in mistakes(sized("llama-3.1-70b", "h100 x8"))}
    latent = {one.key: one for one in mistakes(sized("deepseek-v3", "h200 x8"))}
    assert (latent["latent_twice"].wrong, latent["tensor_parallel"].wrong) == (140_544, 70_272 / 8)
    assert latent["latent_heads"].wrong == 2 * 61 * 128 * 128 * 2
    assert "hidden" not in latent
    linear = {one.key: one for one in mistakes(sized("qwen3.5-27b"))}
    assert (linear["linear"].wrong, linear["linear"].right) == (64 * 4096, 65_536)


def test_multi_head_models_make_no_hidden_size_mistake() -> None:
    assert "hidden" not in {one.key for one in mistakes(sized("llama-2-7b"))}  # heads x head_dim is hidden_size


def test_reported_totals() -> None:
    # 48 GB of Llama-2-70B at 15 requests: 9,766 tokens each with its 8 KV heads, beyond its 4,096; 1,221 were all 64 cached.
    found = {one.what: one.each for one in readings(load_model("llama-2-70b"), 48e9, 15)}
    assert found["as the model is, 16-bit"] == pytest.approx(48e9 / 15 / 327_680)
    assert found["every attention head cached (multi-head)"] == pytest.approx(1220.7, abs=0.1)
    # 2 TB of a 175B model at 1,000/s: 424 tokens for every second a request stays.
    assert readings(load_model("gpt3-175b"), 2e12, 1000)[0].each == pytest.approx(423.9, abs=0.1)


def test_the_words() -> None:
    result = run("llama-3.1-70b", "8 x h100", "--len", "32768", "--explain")
    assert result.exit_code == 0
    for text in (
        "llama-3.1-70b on 8 x h100, engine profile vllm-large",
        "70,552,387,584 parameters x 2 B / 8",
        "80 x 2 x 1 x 128 x 2 B (8 KV heads on 8 devices)",
        "89,842 / 2,048, as vLLM prints it",
        "1,437,472 tokens",
        "fits: 43 requests of 32,768 tokens at once (vLLM's log says 43.87x)",
        "hidden_size in place of kv_heads x head_dim",
    ):
        assert text in result.output
    assert "usual mistakes" not in run("llama-3.1-70b", "8 x h100").output


def test_the_words_where_it_does_not_fit() -> None:
    result = run("llama-3.1-70b", "h100", "--len", "4096")
    assert result.exit_code == 0  # a question, not a gate
    assert "does not fit: a request of 4,096 tokens needs 256 blocks, 0 can be used; 2 x h100 would do" in result.output
    result = run("llama-3.1-8b", "l4", "--len", "131072")
    # 22.08 GiB usable less 14.957 weights, 0.416 activations and 0.75 are 5.956 GiB, 3,049 blocks of 2 MiB.
    assert "3,048 can be used; a request of 48,768 tokens does; 2 x l4 would do" in result.output
    result = run("llama-3.1-70b", "8 x h100", "--concurrency", "2000", "--prompt", "8192", "--output", "1024")
    assert "2,000 requests of 8,192 + 1,024 tokens do not fit: they need 1,152,000 blocks and 89,841 can be used" in result.output
    assert "155 requests fit" in result.output
    result = run("llama-3.1-8b", "8 x h100", "--concurrency", "1025", "--prompt", "100", "--output", "100")
    assert "(max_num_seqs is 1,024)" in result.output
    result = run("gpt3-175b", "8 x h100", "--concurrency", "1000", "--prompt", "1024", "--output", "1024")
    assert "27 requests fit; no tensor-parallel group of h100 would do" in result.output


def test_reported_in_words() -> None:
    result = run("llama-2-70b", "4 x h100", "--reported", "48GB", "--concurrency", "15")
    assert "9,766 tokens  at      327,680 B/token  as the model is, 16-bit (context ends at 4,096)" in result.output
    assert "1,221 tokens" in result.output
    result = run("gpt3-175b", "16 x h100", "--reported", "2TB", "--rate", "1000/s")
    assert "for each request and second it stays" in result.output
    assert "424 tokens" in result.output


def test_json(tmp_path: Path) -> None:
    data = json.loads(run("gpt-oss-120b", "h100", "--kv-memory", "5.38GiB", "--json").output)
    values = {line["key"]: line["value"] for line in data["lines"]}
    assert (values["blocks"], values["request_blocks"], values["tokens"]) == (9793, 8713, 147_318)
    assert data["fits"] is True
    assert data["devices_enough"] is None  # memory was given, not computed
    assert [group["window"] for group in data["groups"]] == [128, None]
    assert {one["key"] for one in data["mistakes"]} >= {"window", "block_product"}


def test_kv_precision_and_settings() -> None:
    data = json.loads(
        run("llama-3.1-8b", "h100", "--kv-dtype", "fp8", "--set", "block=32", "--utilization", "80%", "--json").output
    )
    values = {line["key"]: line["value"] for line in data["lines"]}
    assert (values["kv_token_bytes"], values["block_bytes"]) == (65_536, 32 * 65_536)
    assert values["usable"] == pytest.approx(0.8 * 80 * GIB)


def test_a_config_json_and_its_notes() -> None:
    path = Path(__file__).parent.parent / "data" / "configs" / "Qwen3.5-27B.json"
    result = run(str(path), "2 x h100")
    assert result.exit_code == 0
    assert "note: the language model of text_config alone" in result.output
    assert "48 layers, linear attention: per sequence" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("llama-3-8b", "h100"), "did you mean 'llama-3.1-8b'"),
        (("llama-3.1-8b", "h10"), "did you mean 'h100'"),
        (("nowhere/config.json", "h100"), "no file nowhere/config.json"),
        (("llama-3.1-8b", "h100", "--set", "blok=1"), "did you mean 'block'"),
        (("llama-3.1-8b", "h100", "--set", "block"), "write KEY=VALUE"),
        (("llama-3.1-8b", "h100", "--engine", "vlm"), "did you mean 'vllm'"),
        (
            ("llama-3.1-8b", "h100", "--utilization", "92"),
            "error: --utilization: '92' is not a share: write a number and % (for example 90%)",
        ),
        (("llama-3.1-8b", "h100", "--set", "gpu_memory_utilization=120%"), "error: gpu_memory_utilization: Input should be less"),
        (("llama3", "h100"), "did you mean 'llama-3.1-8b'"),
        (("llama-3.1-8b", "h100", "--kv-dtype", "fp7"), "known are fp32, fp16, bf16, fp8, int8"),
        (("llama-3.1-8b", "h100", "--prompt", "100"), "go together"),
        (("llama-3.1-8b", "h100", "--concurrency", "15"), "go together"),
        (("llama-3.1-8b", "h100", "--kv-memory", "0GB"), "must be more than 0"),
        (("llama-3.1-8b", "h100", "--rate", "3/s"), "--rate goes with --reported"),
        (("llama-3.1-8b", "h100 x0"), "count"),
    ],
)
def test_bad_input_ends_in_one_line(words: tuple[str, ...], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert len(result.output.strip().splitlines()) == 1

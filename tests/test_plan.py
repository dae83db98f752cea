"""`outrider plan`: expected steps, plans, what vLLM starts with, bad input."""

import json
import re
import shlex
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_helpers import ROOT, Call
from examples import examples
from outrider.core.errors import SettingError
from outrider.costs.expected_speed import expected_tokens
from outrider.lab.plan.acceptance import LONGEST, Acceptance, expected_steps, of_workload, read_acceptance
from outrider.lab.plan.calls import (
    Machine,
    PlannedModel,
    call_bytes,
    call_operations,
    call_time,
    largest_batch,
    machine_of,
    memory_bytes,
    model_error,
)
from outrider.lab.plan.catalogue import catalogue, token_ratios
from outrider.lab.plan.plan import LENGTHS, Asked, export_vllm, make_plan, plan_batch
from outrider.lab.plan.shapes import HEADS, ModelShape, find_shape, head_of
from outrider.models.embedded import embedded_default

KNOWN = catalogue()
PAIR = ("--target", "llama-3.1-70b", "--draft", "llama-3.2-1b", "--on", "h100x4")
SHARES = st.floats(0, 1)


def asked(
    on: str = "h100x4",
    *,
    drafts: Sequence[str] = ("llama-3.2-1b",),
    target: str = "llama-3.1-70b",
    **changes: Any,
) -> Asked:
    machine, shape = machine_of(on, KNOWN), find_shape(target, KNOWN)
    shapes = [head_of(shape, name) if name in HEADS else find_shape(name, KNOWN) for name in drafts]
    expected = Acceptance.of(changes.pop("acceptance", 0.7))
    fields: dict[str, Any] = {
        "target": PlannedModel(shape, (machine,)),
        "drafts": [PlannedModel(draft, (machine,), acceptance=expected) for draft in shapes],
        "batches": (1, 8, 64),
        "context": 1024,
        "machine": machine,
        "lookup": Acceptance(tuple(0.6 * 0.8**i for i in range(LONGEST)), (1.0,) * LONGEST, offered=0.25),
    }
    return Asked(**{**fields, **changes})


# Expected steps


@settings(max_examples=examples(50))
@given(SHARES, st.integers(1, LONGEST))
def test_expected_tokens_are_those_of_the_equation(probability: float, length: int) -> None:
    step = expected_steps(None, Acceptance.of(probability), length)
    assert step.tokens == pytest.approx(expected_tokens(length, probability))
    assert step.target_calls == {length + 1: 1.0}
    assert sum(n * size for size, n in step.draft_calls.items()) == length + 1


@settings(max_examples=examples(50))
@given(SHARES, st.lists(SHARES, min_size=1, max_size=LONGEST), st.integers(1, LONGEST))
def test_the_calls_of_a_step_are_one_of_the_target(offered: float, shares: list[float], length: int) -> None:
    falling = sorted(shares, reverse=True) + [0.0] * LONGEST
    drafted = (1.0, *falling[: LONGEST - 1])
    lookup = Acceptance(tuple(0.5 * share for share in drafted), drafted, offered)
    model = Acceptance.of(0.5)
    for step in (
        expected_steps(lookup, None, length),
        expected_steps(None, model, length),
        expected_steps(lookup, model, length),
    ):
        assert sum(step.target_calls.values()) == pytest.approx(1)
        assert 1 <= step.tokens <= 1 + length
        assert max(step.target_calls) <= length + 1


@pytest.mark.parametrize(
    ("text", "name", "accepted"),
    [
        ("0.8", "", (0.8, 0.64, 0.512)),
        ("0.8,0.6", "", (0.8, 0.6, 0.45)),
        ("lookup=0.5", "lookup", (0.5, 0.25, 0.125)),
        ("a=b=0.5,0", "a=b", (0.5, 0.0, 0.0)),
        ("0", "", (0.0, 0.0, 0.0)),
    ],
)
def test_acceptance_is_read_as_it_is_typed(text: str, name: str, accepted: tuple[float, ...]) -> None:
    who, found = read_acceptance(text)
    assert who == name and found.accepted[:3] == pytest.approx(accepted)
    assert len(found.accepted) == LONGEST


def test_every_bundled_table_falls_and_lies_below_what_is_drafted() -> None:
    for name in ("all", "chat", "code", "edits", "json", "summaries", "reasoning"):
        for table in of_workload(name).values():
            assert len(table.accepted) == len(table.drafted) == LONGEST
            assert list(table.accepted) == sorted(table.accepted, reverse=True)
            assert all(a <= d for a, d in zip(table.accepted, table.drafted, strict=True))


# The plan


def test_a_speedup_is_tokens_over_seconds_against_plain_calls() -> None:
    planned = asked()
    [batch] = [b for b in make_plan(planned).batches if b.batch == 8]
    target, draft = planned.target, planned.drafts[0]
    options = {"batch": 8, "context": 1024}
    plain_s = target.call_s(1, **options)
    step_s = target.call_s(4, **options) + draft.call_s(2, **options) + 2 * draft.call_s(1, **options)
    way = next(w for w in batch.ways if (w.drafters, w.draft_length) == ("draft", 3))
    assert batch.plain_tokens_per_s == pytest.approx(8 / plain_s)
    assert way.speedup == pytest.approx(expected_tokens(3, 0.7) * plain_s / step_s)
    assert way.tokens_per_s == pytest.approx(8 * expected_tokens(3, 0.7) / step_s)
    assert way.tokens_per_call == pytest.approx(expected_tokens(3, 0.7))


def test_above_break_even_a_draft_pays_and_below_it_does_not() -> None:
    found = plan_batch(asked(), 8).break_even_acceptance["llama-3.2-1b"]
    assert found is not None
    for factor, pays in ((1.02, True), (0.98, False)):
        best = plan_batch(asked(acceptance=found["acceptance"] * factor, lookup=None), 8).best
        assert (best is not None) == pays


def test_how_wrong_the_model_was_is_said_apart() -> None:
    error = model_error()
    assert error["calls"]["median"] <= 0.15 and error["speedups"]["median"] <= 0.15
    assert error["consumer"]["median"] <= 0.15 and error["consumer"]["rows"] >= 30
    assert error["range"]["held"] >= 0.9 * error["range"]["rows"] >= 60


def test_a_range_is_from_worse_acceptance_and_costs_to_better_ones() -> None:
    ways = (way for way in plan_batch(asked(odds=2.0, costs=1.2), 1).ways if way.drafters == "draft")
    way = max(ways, key=lambda way: way.speedup)
    low, high = (
        next(
            other.speedup
            for other in plan_batch(asked(acceptance=0.7 * odds / (0.3 + 0.7 * odds)), 1).ways
            if (other.name, other.draft_length) == (way.name, way.draft_length)
        )
        for odds in (1 / 2, 2)
    )
    assert way.low == pytest.approx(low / 1.2) and way.high == pytest.approx(high * 1.2)


# What vLLM starts with

CASES: dict[str, dict[str, Any]] = {
    "draft": {},
    "draft at fewer bits": {"drafts": ["llama-3.2-1b:fp8"], "target": "llama-3.1-70b:fp8"},
    "lookup": {"drafts": []},
    "mtp": {"drafts": ["mtp"], "target": "deepseek-v3", "on": "h200x8"},
    "eagle3": {"drafts": ["eagle3"]},
    "one": {"on": "mi300x", "batches": [1]},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_vllms_own_config_takes_it(case: str) -> None:
    vllm_config = pytest.importorskip("vllm.config.speculative", reason="vLLM is not installed")
    config = export_vllm(make_plan(asked(**CASES[case]))).config
    assert config is not None and set(config) <= set(vllm_config.SpeculativeConfig.__dataclass_fields__)


def test_nothing_is_exported_where_nothing_pays() -> None:
    found = export_vllm(make_plan(asked(drafts=["llama-3.1-8b"], acceptance=0.01, lookup=None)))
    assert found.config is None and "no draft is expected to pay" in found.script
    assert "spec" not in " ".join(found.command)


def test_vllm_gets_the_draft_and_its_length_as_a_script_or_json(outrider: Call) -> None:
    words = ("plan", *PAIR, "--batch", "1", "--acceptance", "0.8", "--export", "vllm")
    found = json.loads(outrider(*words, "--json").out)
    assert found["config"]["method"] == "draft_model" and found["config"]["num_speculative_tokens"] >= 1
    assert found["config"]["model"] == "meta-llama/Llama-3.2-1B-Instruct"
    assert found["command"][:3] == ["vllm", "serve", "meta-llama/Llama-3.1-70B-Instruct"]
    assert json.loads(found["command"][-1]) == found["config"]
    *notes, command = outrider(*words).out.splitlines()
    assert all(line.startswith("# ") for line in notes) and shlex.split(command) == found["command"]
    assert "min_p" in notes[-1] and "logit_bias" in notes[-1]


# The command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            (*PAIR, "--acceptance", "0.8"),
            "70.6B 4 x NVIDIA H100 SXM, under vLLM as given published speed-ups",
        ),
        (("-m", "Qwen2.5-Coder-32B", "--on", "RTX 3090"), "under llama.cpp pays fits"),
        (("-m", "glm-4.5", "--on", "8x h200", "--batch", "1,512"), "active"),
        (("-m", "llama-4-maverick", "--on", "h100x8", "--workload", "code"), "code:"),
        (("-m", "qwen3.5-0.8b", "--on", "m1"), ""),
    ],
)
def test_a_plan_says_what_to_do_first_and_is_80_columns_wide(
    outrider: Call, words: tuple[str, ...], said: str
) -> None:
    found = outrider("plan", *words)
    text = " ".join(found.out.split())
    figures = r"[\d.]+x \([\d.]+ to [\d.]+x\) plain decoding"
    first = rf"Draft with .*, up to \d+ tokens: {figures}, from .* tokens/s|Decode plainly: .* give {figures}"
    assert found.status == 0 and re.match(first, text)
    assert all(part in text for part in said.split())
    lines = found.out.splitlines()
    assert all(len(line) <= 80 for line in lines) and "–" not in found.out
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("batch")) :]
    assert all("x " in line and " to " in line for line in table[1 : table.index("")])


def test_an_8b_draft_for_32b_on_a_3090_is_not_promised_what_nobody_measured(outrider: Call) -> None:
    words = ("-m", "qwen2.5-coder-32b", "-md", "qwen2.5-coder-0.5b", "--on", "3090", "--workload", "code")
    [batch] = json.loads(outrider("plan", *words, "--json").out)["batches"]
    [best] = [way for way in batch["drafters"] if way["drafters"] == "draft"]
    assert 1.5 <= best["speedup"] <= 2.5 and best["low"] <= 1.5 and best["high"] >= 2.5


def test_json_has_every_batch_way_and_what_it_rests_on(outrider: Call) -> None:
    plan = json.loads(outrider("plan", *PAIR, "--batch", "8,1", "--json").out)
    assert [batch["batch"] for batch in plan["batches"]] == [1, 8]
    for batch in plan["batches"]:
        assert len(batch["ways"]) == 3 * len(LENGTHS)
        assert batch["best"] == max(batch["ways"], key=lambda way: way["speedup"])
        memory = batch["memory"]
        assert memory["fits"] and memory["weights_bytes"] + memory["kv_bytes"] < memory["usable_bytes"]
    weights = [model["weights_bytes"] for model in (plan["target"], *plan["drafts"])]
    assert plan["batches"][0]["memory"]["weights_bytes"] == pytest.approx(sum(weights))
    assert "Qwen2.5-Coder" in plan["acceptance"] and plan["model_error"] == model_error()


TOO_LARGE = ("--target", "llama-3.1-405b:bf16", "--draft", "none", "--on", "h100x4")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "it needs hardware"),
        (("--on", "h100"), "it needs a target"),
        (("--target", "llama-3.1-8", "--on", "h100"), "Did you mean llama-3.1-8b"),
        (("--target", "llama-3.1-8b:q5", "--on", "h100"), "no such type of weights is known"),
        (("--target", "llama-3.1-8b", "--on", "h1"), "no such hardware is known. Did you mean h100"),
        (("--target", "llama-3.1-8b", "--on", "nothing-like-it"), "There are "),
        (("--target", "llama-3.1-8b", "--on", "h100x0"), "out of range"),
        (("--target", "nowhere.gguf", "--on", "h100"), "there is no such file"),
        (TOO_LARGE, "526 GB too little memory"),
        (TOO_LARGE, "--on h100x12"),
        ((*PAIR, "--draft", "llama-3.1-405b:int4"), "it is larger than its target"),
        ((*PAIR, "--batch", "1,x"), "is not a list of numbers"),
        ((*PAIR, "--batch", "0"), "is out of range"),
        ((*PAIR, "--context", "0"), "--context"),
        ((*PAIR, "--acceptance", "2"), "a share is between 0 and 1"),
        ((*PAIR, "--acceptance", "0.5,nan"), "a share is between 0 and 1"),
        ((*PAIR, "--acceptance", "often"), "is not a number"),
        ((*PAIR, "--acceptance", "0.5,0.6"), "the shares by position rise"),
        ((*PAIR, "--acceptance", "other=0.5"), "there is no such draft"),
        ((*PAIR, "--workload", "codes"), "Did you mean code"),
        ((*PAIR, "--hardware", "nowhere.toml"), "no such file or directory"),
        ((*PAIR, "--export", "sglang"), "--export: sglang cannot be used"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(outrider: Call, words: tuple[str, ...], said: str) -> None:
    found = outrider("plan", *words)
    assert found.status == 2 and found.out == ""
    assert said in found.said and "Traceback" not in found.err


# The cost model of calls: experts against enumeration, what must rise, sums of memory, known models

MODELS = st.sampled_from(sorted(KNOWN.tables["models"]))
DEVICES = st.sampled_from(sorted(KNOWN.tables["hardware"]))
COUNTS = st.integers(1, 16)


def mixture(experts: int, used: int) -> ModelShape:
    return ModelShape("mixture", 1, 8, 8, 8.0, 16.0, 16.0, 0.0, experts=experts, experts_used=used)


@pytest.mark.parametrize(
    ("experts", "used", "tokens"), [(2, 1, 3), (3, 2, 2), (4, 2, 3), (5, 1, 4), (3, 3, 2)]
)
def test_expected_experts_are_those_of_enumeration(experts: int, used: int, tokens: int) -> None:
    choices = list(combinations(range(experts), used))
    texts = list(product(choices, repeat=tokens))
    mean = sum(len({expert for choice in text for expert in choice}) for text in texts) / len(texts)
    assert mixture(experts, used).distinct_experts(tokens) == pytest.approx(mean)


@settings(max_examples=examples(100))
@given(MODELS, DEVICES, COUNTS, st.integers(1, 64), st.integers(1, 64), st.integers(0, 8192))
def test_a_call_costs_no_less_for_more_of_anything(
    model: str, device: str, count: int, tokens: int, batch: int, context: int
) -> None:
    shape, machine = find_shape(model, KNOWN), Machine(KNOWN.device(device), count)

    def seconds(tokens: int, batch: int, context: int) -> float:
        return call_time(shape, machine, tokens, batch=batch, context=context)

    here = seconds(tokens, batch, context)
    assert here > 0
    assert seconds(tokens + 1, batch, context) >= here
    assert seconds(tokens, batch + 1, context) >= here
    assert seconds(tokens, batch, context + 100) >= here


def test_a_dense_call_reads_its_weights_once_and_computes_for_every_token() -> None:
    shape = find_shape("llama-3.1-8b", KNOWN)
    logits = 4 * shape.vocabulary
    assert call_bytes(shape, 1) == shape.dense_bytes + logits
    assert call_bytes(shape, 5) == shape.dense_bytes + 5 * logits
    assert call_bytes(shape, 1, batch=3, context=10) == shape.dense_bytes + 3 * (shape.kv_bytes(10) + logits)
    assert call_operations(shape, 4) > 3.99 * call_operations(shape, 1) > 7.9 * shape.active_parameters


def test_devices_that_share_layers_read_faster_and_wait_for_each_other() -> None:
    shape = find_shape("llama-3.1-70b", KNOWN)
    one, eight = (call_time(shape, machine_of(name, KNOWN), 1) for name in ("h100", "h100x8"))
    assert one / 8 < eight < one / 4
    first, second = (call_time(shape, machine_of(name, KNOWN), 1) for name in ("wse-3", "wse-3x4"))
    assert second > first, "a pipeline only adds hops"


@settings(max_examples=examples(50))
@given(MODELS, MODELS, st.sampled_from(["h100x8", "m2-ultra", "rtx-4090"]), st.integers(1, 9000))
def test_the_largest_batch_fits_and_one_more_does_not(
    first: str, second: str, name: str, context: int
) -> None:
    shapes, machine = [find_shape(first, KNOWN), find_shape(second, KNOWN)], machine_of(name, KNOWN)
    most = largest_batch(shapes, machine, context)
    weights, kv = memory_bytes(shapes, batch=most, context=context)
    assert weights == sum(shape.memory_bytes for shape in shapes)
    assert kv == pytest.approx(most * sum(shape.kv_bytes(context) for shape in shapes))
    assert (weights + kv <= machine.usable_bytes) or most == 0
    assert sum(memory_bytes(shapes, batch=most + 1, context=context)) > machine.usable_bytes


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama-3.1-405b", 405.9, 405.9),
        ("llama-3.1-70b", 70.6, 70.6),
        ("llama-3.1-8b", 8.03, 8.03),
        ("llama-3.2-3b", 3.21, 3.21),
        ("llama-3.2-1b", 1.24, 1.24),
        ("qwen2.5-0.5b", 0.494, 0.494),
        ("qwen2.5-7b", 7.62, 7.62),
        ("qwen2.5-72b", 72.7, 72.7),
        ("qwen3-0.6b", 0.6, 0.6),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("gpt-oss-20b", 20.9, 3.6),
        ("gpt-oss-120b", 116.8, 5.1),
        ("deepseek-v3", 671, 37),
        ("llama-4-maverick", 400, 17),
        ("qwen3-next-80b-a3b", 80, 3.9),
        ("qwen3.6-27b", 26.9, 26.9),
        ("gemma-4-31b", 30.7, 30.7),
        ("glm-4.5-air", 106.9, 12.9),
        ("gemma-3-270m", 0.268, 0.268),
        ("gemma-3-27b", 27.0, 27.0),
        ("mistral-7b", 7.25, 7.25),
        ("mixtral-8x7b", 46.7, 12.9),
        ("smollm2-135m", 0.1345, 0.1345),
    ],
)
def test_known_models_have_the_parameters_that_their_makers_name(
    name: str, total: float, active: float
) -> None:
    shape = find_shape(name, KNOWN)
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.01)
    # Makers count the embedding as active, and some the output layer alone.
    least, most = shape.active_parameters / 1e9, (shape.active_parameters + shape.embedding_parameters) / 1e9
    assert least * 0.99 <= active * 1.01 and active <= most * 1.01


def test_every_entry_of_the_catalogue_can_be_used() -> None:
    for name in KNOWN.tables["hardware"]:
        assert KNOWN.device(name).source
    for name in KNOWN.tables["types"]:
        assert find_shape(f"llama-3.2-1b:{name}", KNOWN).memory_bytes > 0
    for name in KNOWN.tables["models"]:
        assert find_shape(name, KNOWN).hub and KNOWN.model(name).family


def test_a_gguf_file_has_the_shape_that_its_name_has() -> None:
    found, known = find_shape(str(embedded_default()), KNOWN), find_shape("smollm2-135m", KNOWN)
    assert found.layers == known.layers and found.width == known.width
    assert found.vocabulary == known.vocabulary and found.kv_values == known.kv_values
    assert found.dense_parameters == pytest.approx(known.dense_parameters, rel=0.001)
    assert found.attention_width == known.attention_width
    assert found.memory_bytes == embedded_default().stat().st_size


@pytest.mark.parametrize("kind", ["mtp", "eagle", "eagle3"])
def test_a_head_is_about_a_layer_of_its_target(kind: str) -> None:
    target = find_shape("llama-3.1-8b", KNOWN)
    head = head_of(target, kind)
    layer = (target.dense_parameters - target.width * target.vocabulary) / target.layers
    assert head.layers == 1 and head.is_head
    assert 0.99 * layer < head.dense_parameters < 4 * layer + target.width * target.vocabulary
    assert head.kv_values == target.kv_values / target.layers


@pytest.mark.parametrize(
    ("section", "text", "name"),
    [
        ("hardware", "rtx3090", "rtx-3090"),
        ("hardware", "RTX 3090", "rtx-3090"),
        ("hardware", "4090", "rtx-4090"),
        ("hardware", "NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070-ti-super"),
        ("hardware", "RTX 3060 12GB", "rtx-3060"),
        ("hardware", "7900 XTX", "rx-7900-xtx"),
        ("hardware", "RTX PRO 6000", "rtx-pro-6000"),
        ("hardware", "RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("hardware", "A6000", "rtx-a6000"),
        ("hardware", "A100 80GB", "a100"),
        ("hardware", "a100-40gb", "a100-40gb"),
        ("hardware", "DGX Spark", "gb10"),
        ("hardware", "Ryzen AI Max+ 395", "strix-halo"),
        ("hardware", "Apple M3 Ultra", "m3-ultra"),
        ("models", "Qwen/Qwen2.5-Coder-32B-Instruct", "qwen2.5-coder-32b"),
        ("models", "Llama 3.1 8B", "llama-3.1-8b"),
        ("models", "gpt-oss:20b", "gpt-oss-20b"),
        ("models", "GLM 4.5 Air", "glm-4.5-air"),
        ("models", "google/gemma-4-31B-it", "gemma-4-31b"),
    ],
)
def test_names_are_taken_as_people_write_them(section: str, text: str, name: str) -> None:
    assert KNOWN.spelled(section, text) == name


def test_drafts_of_a_model_share_its_tokenizer_and_are_smaller() -> None:
    assert KNOWN.drafts_for("qwen2.5-coder-7b") == ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
    assert KNOWN.drafts_for("qwen3.6-27b")[:2] == ["mtp", "qwen3.5-0.8b"]
    assert KNOWN.drafts_for("phi-4") == []


def test_under_llama_cpp_further_tokens_cost_what_is_fitted_and_tiles_come_whole() -> None:
    shape, device = find_shape("qwen2.5-32b:q4_k_m", KNOWN), KNOWN.device("rtx-3090")
    here, there = Machine(device, 1, "llama.cpp"), Machine(device, 1, "vllm")
    read_s = shape.active_parameters * 4.85 / 8 / (0.8 * 936e9)
    extra = call_time(shape, here, 5) - call_time(shape, there, 5)
    assert extra == pytest.approx(4 * device.token_ratio * read_s)
    assert call_time(shape, here, 9) == pytest.approx(call_time(shape, here, 32), rel=0.01)
    assert call_time(shape, here, 1) == call_time(shape, there, 1)
    eight_bits = find_shape("qwen2.5-32b:q8_0", KNOWN)
    assert call_time(eight_bits, here, 5) - call_time(eight_bits, there, 5) == pytest.approx(extra)


def test_a_hybrid_keeps_a_state_and_kv_of_some_layers() -> None:
    hybrid = find_shape("qwen3.6-27b", KNOWN)
    assert hybrid.kv_bytes(0) == 48 * 6144 * 128 * 4
    assert hybrid.kv_bytes(1000) - hybrid.kv_bytes(0) == 1000 * 16 * 2 * 4 * 256 * 2
    half = find_shape("qwen3.6-27b", KNOWN, kv_type="q8_0")
    assert half.kv_bytes(1000) - half.kv_bytes(0) == 1000 * 16 * 2 * 4 * 256 * 8.5 / 8


def test_a_file_of_hardware_adds_to_what_is_known(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        '[hardware.mine]\nlike = "h100"\ntitle = "Mine"\nmemory_gb_s = 5000\n'
        '[models.mine-8b]\nlike = "llama-3.1-8b"\nlayers = 16\n'
    )
    known = catalogue(own)
    assert known.device("mine").memory_gb_s == 5000 and known.device("mine").memory_gb == 80
    assert known.device("h100") == KNOWN.device("h100")
    mine, other = find_shape("mine-8b:q8_0", known), find_shape("llama-3.1-8b:q8_0", known)
    assert mine.kv_values == other.kv_values / 2 and mine.parameters < other.parameters


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x", "it is not valid TOML"),
        ("[cars.a]\n", "'cars' is none of its tables"),
        ("[hardware]\na = 1\n", "hardware.a is not a table"),
        ('[hardware.mine]\nkind = "boat"\n', "no such kind is known"),
        ('[hardware.mine]\nkind = "gpu"\n', "title"),
        ('[hardware.mine]\nlike = "mine"\n', "which is not there"),
        ('[hardware.mine]\nlike = "h100"\nmemory_gb = -1\n', "memory_gb"),
    ],
)
def test_a_broken_file_of_hardware_is_refused(tmp_path: Path, text: str, why: str) -> None:
    own = tmp_path / "own.toml"
    own.write_text(text)
    with pytest.raises(SettingError) as error:
        catalogue(own).device("mine")
    assert why in str(error.value)


@pytest.mark.slow
def test_the_errors_that_are_shown_and_the_bundled_acceptance_are_those_of_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from plan import acceptance, check
    from policy.recorded import read_recordings

    found = [(errors, ratios) for *_, errors, ratios in check.curve_errors()]
    absolute, relative = ([error for part in parts for error in part] for parts in zip(*found, strict=True))
    ratios, rows = check.published()
    assert ratios == token_ratios() and check.summaries(absolute, relative, rows) == model_error()
    text = acceptance.written(read_recordings(acceptance.RECORDINGS))
    assert text == (ROOT / "src/outrider/lab/plan/acceptance.toml").read_text(encoding="utf-8")

"""The cost model of calls: experts against enumeration, what must rise, sums of memory, known models."""

from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from outrider.core.errors import SettingError
from outrider.lab.plan.calls import (
    Machine,
    call_bytes,
    call_operations,
    call_time,
    largest_batch,
    machine_of,
    memory_bytes,
)
from outrider.lab.plan.catalogue import catalogue
from outrider.lab.plan.shapes import ModelShape, find_shape, head_of
from outrider.models.embedded import embedded_default

KNOWN = catalogue()
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
    ("text", "near"),
    [("h10", "h100"), ("rtx-4900", "rtx-4090"), ("nothing-like-it", "There are"), ("h100x0", "out of range")],
)
def test_unknown_hardware_is_named_with_its_nearest(text: str, near: str) -> None:
    with pytest.raises(SettingError) as error:
        machine_of(text, KNOWN)
    assert near in str(error.value)


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

"""Where a model is computed, its LoRA adapters and stretched positions: as the native library gets them."""

import ctypes
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from backends import FILES, IK, MAINLINE, NATIVE
from cli_helpers import TEMPLATE, Call
from outrider.backends.gguf.devices import (
    device_array,
    experts_on_host,
    list_devices,
    load_parts,
    override_array,
    share_array,
)
from outrider.backends.gguf.head_model import HeadModel
from outrider.backends.gguf.libraries import describe_gpus, open_library
from outrider.backends.gguf.library import LibraryFile
from outrider.backends.gguf.log import show_log
from outrider.backends.gguf.memory import GPUS, HOST, Contexts, check_memory, place_layers, what_would_fit
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.rewinding import RewindSupport
from outrider.backends.tuning import subject_of
from outrider.cli.line import Line
from outrider.cli.plans import load_options
from outrider.cli.settings import RunSettings
from outrider.core.data import Logits, Span
from outrider.core.errors import BackendError, ModelFileError, OutOfMemory, SettingError
from outrider.core.notices import collect_notices
from outrider.core.schema import settings_of
from outrider.models.gguf import Layer, Layout, read_card
from tiny import ARCHITECTURES, WITH_HEADS
from tiny_gguf import WIDTH, finish, write_tiny


def write_adapter(path: Path, *, seed: int = 0, size: float = 0.05, width: int = WIDTH) -> Path:
    """Write an adapter of the first layer's attention output, whose product is about `size` large."""
    random = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0)
    for part, shape in (("a", (2, width)), ("b", (width, 2))):
        values = random.normal(0, size**0.5, shape).astype(np.float32)
        writer.add_tensor(f"blk.0.attn_output.weight.lora_{part}", values)
    finish(writer)
    return path


TEXT = (5, 6, 7, 8, 9)


def native(name: str, **given: Any) -> LoadOptions:
    """Options for one of the libraries that are here."""
    return LoadOptions(threads=1, library=str(FILES[name].path), **given)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("placed") / "target.gguf")


def logits(path: Path, options: LoadOptions, max_sequences: int = 1) -> Logits:
    with closing(Weights(path, options)) as weights:
        context = weights.open(64, max_sequences=max_sequences)
        [rows] = context.decode([Span(0, TEXT, 0, len(TEXT))])
        return np.array(rows)


@pytest.mark.parametrize("name", NATIVE)
def test_an_adapter_changes_the_logits_by_its_scale(name: str, model: Path, tmp_path: Path) -> None:
    adapter, other = (str(write_adapter(tmp_path / f"{seed}.gguf", seed=seed)) for seed in (1, 2))
    # ik_llama.cpp has no flash attention with adapters, which rounds otherwise.
    plain = native(name, flash_attention="off")

    def with_adapters(*adapters: tuple[str, float]) -> Logits:
        return logits(model, replace(plain, adapters=adapters))

    base = logits(model, plain)
    assert np.array_equal(with_adapters((adapter, 0.0)), base)
    half, whole = with_adapters((adapter, 0.5)), with_adapters((adapter, 1.0))
    assert 0.1 < np.abs(half - base).max() < np.abs(whole - base).max()
    assert np.abs(with_adapters((adapter, 1.0), (other, 1.0)) - whole).max() > 0.1
    several = logits(model, native(name, adapters=((adapter, 1.0),)), 2)
    assert np.allclose(several, whole, atol=0.1)  # every context has it


def test_ik_has_adapters_without_flash_attention_alone(model: Path, tmp_path: Path) -> None:
    adapters = ((str(write_adapter(tmp_path / "a.gguf")), 1.0),)
    with closing(Weights(model, native(IK[0], adapters=adapters))) as weights:
        assert weights.open(64).flash_attention == "off"
    asked = native(IK[0], adapters=adapters, flash_attention="on")
    with closing(Weights(model, asked)) as weights, pytest.raises(SettingError, match="LoRA only"):
        weights.open(64)


@pytest.mark.parametrize("name", NATIVE)
def test_an_adapter_that_cannot_be_used_is_named(name: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no adapter")
    write_adapter(tmp_path / "wide.gguf", width=128)
    for file in ("missing.gguf", "text.gguf", "wide.gguf"):
        path = str(tmp_path / file)
        with pytest.raises(ModelFileError, match=r"LoRA adapter \(GGUF\)") as caught:
            Weights(model, native(name, adapters=((path, 1.0),)))
        assert caught.value.what == path
    with pytest.raises(ModelFileError, match=r"general\.type"):
        Weights(model, native(MAINLINE[0], adapters=((str(model), 1.0),)))


def test_positions_are_stretched(model: Path) -> None:
    base = logits(model, native(MAINLINE[0]))

    def changed(**given: Any) -> float:
        return float(np.abs(logits(model, native(MAINLINE[0], **given)) - base).max())

    assert changed(rope_freq_scale=1.0) == 0.0
    linear = changed(rope_freq_scale=0.25)
    assert linear > 0.1 and changed(rope_scaling="linear", rope_freq_scale=0.25) == linear
    yarn = changed(rope_scaling="yarn", rope_freq_scale=0.25, yarn_orig_ctx=64)
    assert yarn > 0.1 and yarn != linear
    assert changed(rope_freq_base=500.0) > 0.1
    for scaled in ({"rope_freq_scale": 0.25}, {"rope_scaling": "yarn"}, {"yarn_orig_ctx": 64}):
        with pytest.raises(SettingError, match=r"^scaled positions \(RoPE, YaRN\): ik_llama"):
            Weights(model, native(IK[0], **scaled))


class TwoGpus:
    """A stand-in for a library with two GPUs and the processor, numbered by their pointers."""

    title, why_no_gpu = "llama.cpp", ""

    def __init__(self) -> None:
        self.functions: Any = self
        self.devices = {10: ("CPU", 0), 11: ("CUDA0", 1), 12: ("CUDA1", 1)}

    def declare(self, _signatures: object) -> None: ...

    def llama_supports_gpu_offload(self) -> bool:
        return True

    def uses_gpu(self, options: LoadOptions) -> bool:
        return options.gpu_layers != 0

    def fit(self, *_asked: object) -> LoadOptions | None:
        return None

    def llama_max_devices(self) -> int:
        return 4

    def ggml_backend_dev_count(self) -> int:
        return len(self.devices)

    def ggml_backend_dev_get(self, index: int) -> int:
        return list(self.devices)[index]

    def ggml_backend_dev_name(self, device: int) -> bytes:
        return self.devices[device][0].encode()

    def ggml_backend_dev_description(self, device: int) -> bytes:
        return f"Device {device}".encode()

    def ggml_backend_dev_type(self, device: int) -> int:
        return self.devices[device][1]

    def ggml_backend_dev_buffer_type(self, device: int) -> int:
        return 100 + device

    def ggml_backend_dev_memory(self, device: int, free: Any, _total: Any) -> None:
        free._obj.value = device * 10**9

    def ggml_backend_cpu_buffer_type(self) -> int:
        return 110

    def ggml_backend_buft_name(self, buffer: int) -> bytes:
        return self.devices[buffer - 100][0].encode()


def test_devices_shares_and_tensors_become_the_librarys_arrays() -> None:
    library: Any = TwoGpus()
    assert [device.name for device in list_devices(library)] == ["CPU", "CUDA0", "CUDA1"]
    assert list(device_array(library, ("CUDA1", "CUDA0"))) == [12, 11, None]
    assert list(device_array(library, ("none",))) == [None]
    assert list(share_array(library, (3.0, 1.0))) == [3.0, 1.0, 0.0, 0.0]
    entries = override_array(library, ("exps=CPU", "blk.1=CUDA1"))
    found = [(entry.pattern, entry.buft) for entry in entries]
    assert found == [(b"exps", 110), (b"blk.1", 112), (None, None)]
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: device_array(library, ("CUDA7",)), "device CUDA7: .* its devices are CUDA0, CUDA1"),
        (lambda: device_array(library, ("CPU",)), "device CPU"),
        (lambda: share_array(library, (1.0,) * 5), "5 shares are given, and llama.cpp knows 4 devices"),
        (
            lambda: override_array(library, ("exps=CUDA7",)),
            "no buffer CUDA7. Choose one of CPU, CUDA0, CUDA1",
        ),
    ]
    for wrong, message in refused:
        with pytest.raises(SettingError, match=message):
            wrong()


GB = 10**9
LARGE = Layout(
    name="large",
    tensors={**{f"blk.{i}.attn_q.weight": 10 * GB for i in range(4)}, "output.weight": 3 * GB},
    layers=[Layer(125, 125)] * 4,
)
"""43 GB; the two GPUs have 23 GB, of which about 21 are to be used."""


@pytest.mark.parametrize(
    ("given", "beside", "count"),
    [({}, 0, 2), ({}, 8, 1), ({}, 19, 0), ({"gpu_layers": 3}, 0, 3), ({"gpu_layers": 0}, 0, 0)],
)
def test_as_many_layers_as_fit_go_to_the_gpus(given: dict[str, Any], beside: int, count: int) -> None:
    library: Any = TwoGpus()
    draft = replace(LARGE, tensors={"output.weight": beside * GB}, layers=[])
    models = [Contexts(LARGE, LoadOptions(**given), 1000), Contexts(draft, LoadOptions(), 1000)]
    with collect_notices() as notices:
        assert place_layers(library, Path("x"), models).gpu_layers == count
    said = f"{count} of 5 layers of large fit on the GPUs, of which 23.0 GB are free"
    assert [note.partition(";")[0] for note in notices] == ([] if given else [said])


def test_a_model_that_fits_is_left_to_the_library_and_one_that_does_not_to_its_own_reckoning() -> None:
    library: Any = TwoGpus()
    small = Contexts(replace(LARGE, tensors={"output.weight": 3 * GB}), LoadOptions(), 1000)
    assert place_layers(library, Path("x"), [small]) == LoadOptions()
    library.fit = lambda _path, options, *_rest: replace(options, tensor_overrides=("exps=CPU",))
    with collect_notices() as notices:
        found = place_layers(library, Path("x"), [Contexts(LARGE, LoadOptions(), 1000)])
    assert found.tensor_overrides == ("exps=CPU",)
    assert notices[0].startswith("5 of 5 layers of large fit on the GPUs, but for some experts")


def test_a_librarys_own_reckoning_is_asked_by_its_cpp_name(model: Path) -> None:
    builds = {name: open_library(FILES[name]) for name in MAINLINE}
    answers = {name: library.fit(model, native(name), 64, 2**20) for name, library in builds.items()}
    exporting = {name for name in builds if hasattr(builds[name].functions, "common_fit_params")}
    assert {name for name, answer in answers.items() if answer is not None} == exporting
    for name in exporting:  # there is no GPU, or it all fits
        assert answers[name] == native(name)


def test_memory_that_runs_out_ends_in_a_line_that_says_what_would_fit() -> None:
    library: Any = TwoGpus()
    assert what_would_fit(library, Contexts(LARGE, LoadOptions())) == (
        "What would fit: 2 layers on the GPU (-ngl)."
    )
    assert not what_would_fit(library, Contexts(LARGE, LoadOptions(gpu_layers=0)))


class InParts(TwoGpus):
    """A library whose devices lie in files beside it, under their usual names or (`hashed`) others."""

    def __init__(self, hashed: bool) -> None:
        super().__init__()
        self._later, self.devices, self.hashed, self.loaded = self.devices, {}, hashed, list[str]()

    def ggml_backend_load_all_from_path(self, folder: bytes) -> None:
        self.loaded.append(folder.decode())
        self.devices = {} if self.hashed else self._later

    def ggml_backend_load(self, file: bytes) -> None:
        self.loaded.append(Path(file.decode()).name)
        self.devices = self._later if b"cuda" in file else {10: ("CPU", 0)}


@pytest.mark.parametrize("hashed", [False, True])
def test_devices_in_files_of_their_own_are_loaded(hashed: bool, tmp_path: Path) -> None:
    library: Any = InParts(hashed)
    assert load_parts(library, tmp_path) == "" and not library.loaded  # there are none
    for name in ("libggml-base.so", "libggml-cpu-1f.so", "libggml-cuda-2e.so"):
        (tmp_path / name).write_text("no library")
    assert load_parts(library, tmp_path) == ""
    parts = ["libggml-cpu-1f.so", "libggml-cuda-2e.so"] if hashed else []
    assert library.loaded == [str(tmp_path), *parts]
    assert [device.name for device in list_devices(library)] == ["CPU", "CUDA0", "CUDA1"]


def test_a_part_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    library: Any = InParts(True)
    library._later = {10: ("CPU", 0)}
    (tmp_path / "libggml-cuda.so").write_text("no library")
    assert load_parts(library, tmp_path).startswith("libggml-cuda.so cannot be loaded (")


def test_setup_lists_gpus_by_the_names_that_options_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.backends.gguf.libraries.open_library", lambda _file: TwoGpus())
    assert describe_gpus(LibraryFile(Path("x"), "x")) == [
        "CUDA0: Device 11, 11.0 GB free",
        "CUDA1: Device 12, 12.0 GB free",
    ]


@pytest.mark.parametrize("name", NATIVE)
def test_the_library_gets_what_was_asked(name: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Weights(model, native(name))) as weights:
        library, seen = weights.library, []
        load, init = library.functions.llama_model_load_from_file, library.functions.llama_init_from_model

        def loading(path: bytes, params: Any) -> Any:
            seen.append(params)
            return load(path, params)

        def opening(handle: int, params: Any) -> Any:
            seen.append(params)
            return init(handle, params)

        monkeypatch.setattr(library.functions, "llama_model_load_from_file", loading)
        monkeypatch.setattr(library.functions, "llama_init_from_model", opening)
        options = native(
            name,
            tensor_split=(2.0,),
            tensor_overrides=experts_on_host(None),
            devices=("none",),
            main_gpu=0,
            kv_offload=False,
            rope_freq_base=500.0,
        )
        with closing(Weights(model, options)) as placed:
            placed.open(64)
    loaded, opened = seen
    assert ctypes.cast(loaded.tensor_split, ctypes.POINTER(ctypes.c_float))[0] == 2.0
    pattern = ctypes.cast(loaded.tensor_buft_overrides, ctypes.POINTER(ctypes.c_char_p))[0]
    assert pattern == rb"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
    if name in MAINLINE:
        assert ctypes.cast(loaded.devices, ctypes.POINTER(ctypes.c_void_p))[0] is None
    assert (opened.offload_kqv, opened.rope_freq_base) == (False, 500.0)


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("given", [{"devices": ("CUDA0",)}, {"tensor_overrides": ("exps=CUDA0",)}])
def test_a_gpu_that_is_not_there_is_named(name: str, given: Any, model: Path) -> None:
    with closing(Weights(model, native(name))) as weights:
        if weights.library.functions.llama_supports_gpu_offload():
            pytest.skip("there is a GPU")
    with pytest.raises(SettingError, match="CUDA0"):
        Weights(model, native(name, **given))


def both(words: str) -> tuple[LoadOptions, LoadOptions]:
    """The load options of a command line: the target's, and its draft's."""
    line = Line("run", words.split(), settings_of(RunSettings))
    assert not line.notices
    parsed = RunSettings.model_validate(line.values())
    return load_options(parsed), load_options(parsed, draft=True)


def test_llama_cpps_names_for_placement_are_taken() -> None:
    found, _ = both("-dev CUDA1,CUDA0 -ts 3,1 -sm row -mg 1 -ngl 20 -nkvo --no-op-offload")
    assert (found.devices, found.tensor_split, found.split_mode) == (("CUDA1", "CUDA0"), (3.0, 1.0), "row")
    assert (found.main_gpu, found.gpu_layers, found.kv_offload, found.op_offload) == (1, 20, False, False)
    found, _ = both(r"-ot blk\.1{1,2}\.=CPU,exps=CUDA0 -ot up=CPU -ncmoe 2")
    experts = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"
    layers = (rf"blk\.0{experts}", rf"blk\.1{experts}")
    assert found.tensor_overrides == (r"blk\.1{1,2}\.=CPU", "exps=CUDA0", "up=CPU", *layers)
    assert both("--cpu-moe")[0].tensor_overrides == experts_on_host(None)
    found, _ = both("--lora a.gguf --lora-scaled b.gguf:0.5,c.gguf:-1")
    assert found.adapters == (("a.gguf", 1.0), ("b.gguf", 0.5), ("c.gguf", -1.0))
    found, _ = both("--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 8192")
    assert (found.rope_scaling, found.rope_freq_scale, found.yarn_orig_ctx) == ("yarn", 0.25, 8192)


def test_the_draft_is_placed_by_itself() -> None:
    target, draft = both("-dev CUDA0 -devd CUDA1 -ngld 3 -ot a=CPU --lora a.gguf")
    assert (draft.devices, draft.gpu_layers, draft.tensor_overrides) == (("CUDA1",), 3, ())
    assert target.tensor_overrides == ("a=CPU",)
    assert target.adapters and not draft.adapters
    _, draft = both("-dev CUDA0 -ts 1,2 --rope-scale 2")
    assert (draft.devices, draft.tensor_split, draft.rope_freq_scale) == (("CUDA0",), (1.0, 2.0), 0.5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-ts 3;1", "-ts 3;1: not a list of numbers"),
        ("-ts 1,-1", "tensor split or scale: it is not a finite number"),
        *((f"-ot {text}", f"-ot {text}: it is not PATTERN=BUFFER") for text in ("exps", "=CPU", "a=")),
        ("-ot (=CPU", "-ot (=CPU: its pattern is broken"),
        ("--lora-scaled a.gguf", "--lora-scaled a.gguf: not FILE:SCALE"),
        ("--lora-scaled a.gguf:x", "--lora-scaled a.gguf:x: not FILE:SCALE"),
        ("--lora-scaled a.gguf:nan", "tensor split or scale: it is not a finite number"),
        ("--rope-scaling no", "rope scaling: 'no' is not known"),
        ("--rope-scale 2 --rope-freq-scale 0.5", "--rope-scale and --rope-freq-scale: one is 1 / the other"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_loaded(line: str, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        both(line)
    assert str(caught.value).startswith(message)


def test_what_changes_outputs_or_costs_has_costs_of_its_own(model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a.gguf", seed=1)

    def key(**given: Any) -> str:
        options = native(MAINLINE[0], **given)
        with closing(Weights(model, options)) as weights:
            return subject_of(weights.open(64), "all").key()

    base = key()
    assert key(kv_offload=True, rope_freq_base=0.0, devices=[]) == base  # as it was before there were any
    changed: list[dict[str, Any]] = [
        {"adapters": ((str(adapter), 1.0),)},
        {"adapters": ((str(adapter), 0.5),)},
        {"rope_freq_base": 500.0},
        {"tensor_split": (1.0,)},
        {"tensor_overrides": ("exps=CPU",)},
        {"kv_offload": False},
        {"op_offload": False},
        {"devices": ("none",)},
    ]
    keys = [key(**given) for given in changed]
    assert len({base, *keys}) == 1 + len(keys)
    write_adapter(adapter, seed=2)
    assert key(**changed[0]) not in keys  # another adapter under the same name


def test_options_come_back_from_json() -> None:
    options = LoadOptions(devices=("a",), tensor_split=(1.0,), adapters=(("a.gguf", 0.5),))
    read: dict[str, Any] = {**asdict(options), "devices": ["a"], "adapters": [["a.gguf", 0.5]]}
    assert LoadOptions(**read) == options and hash(LoadOptions(**read)) == hash(options)


def test_a_split_that_a_library_lacks_is_refused(model: Path) -> None:
    with pytest.raises(BackendError, match="split mode tensor: ik_llama"):
        Weights(model, native(IK[0], split_mode="tensor"))
    assert "tensor" in open_library(FILES[MAINLINE[0]]).split_modes


def test_a_chat_template_and_an_adapter_of_ones_own_and_options_without_effect(
    model: Path, tmp_path: Path, outrider: Call
) -> None:
    line = ("run", "-m", str(model), "-n", "12", "--temp", "0", "-t", "1", "-q", "-p", "hello")
    run = partial(outrider, *line, "--policy", "fixed")

    template, broken = tmp_path / "chat.jinja", tmp_path / "broken.jinja"
    template.write_text(TEMPLATE)
    broken.write_text("{% for m in messages %}")
    raw, chat = run("--raw"), run("--chat-template-file", str(template))
    assert (raw.status, chat.status, chat.err) == (0, 0, "") and chat.out != raw.out
    refused = run("--chat-template-file", str(broken))
    assert refused.status == 2 and refused.err.startswith(f"error: {broken}: it does not compile")
    adapter = write_adapter(tmp_path / "a.gguf", seed=1, size=2.0)
    assert run("--raw", "--lora-scaled", f"{adapter}:0", "-fa", "off").out == run("--raw", "-fa", "off").out
    adapted = run("--raw", "--lora", str(adapter))
    assert adapted.status == 0 and adapted.out != raw.out
    assert run("--raw", "--lora", "missing.gguf").said.startswith(
        "error: missing.gguf: there is no such file"
    )
    unused = run("--raw", "-ts", "3,1", "-ngl", "20")
    assert unused.out == raw.out and unused.said.count("note: -ngl, -ts without effect: ") == 1
    assert "computes on the processor alone here" in unused.said and "docs/gpu.md" in unused.said
    assert "without effect" not in run("--raw", "-ngl", "0").said + run("--raw", "-ngl", "all").said


def test_a_policy_without_its_draft_model_says_so(model: Path, outrider: Call) -> None:
    line = ("run", "-m", str(model), "-n", "4", "--raw", "-t", "1", "-p", "hi", "--spec-type", "draft-mtp")
    done = outrider(*line)
    assert done.status == 0 and "no draft model is loaded, and the policy asks for one alone" in done.said


# The least memory that models need, by the libraries' own account and in arithmetic on GPUs that are not here


_MIB = 2**20
_LOGGED = re.compile(r"(KV|model|CPU) buffer size = +([\d.]+) MiB")
_ROUNDED = 0.011 * 2
"""of the two numbers that a library logs, in MiB"""


def reported(model: Contexts, path: Path, capfd: pytest.CaptureFixture[str]) -> tuple[float, float]:
    """MiB of weights and KV, by the library's own account."""
    show_log(shown=True)
    try:
        with closing(Weights(path, model.options)) as weights:
            target = GgufModel(weights, model.capacity_tokens, 1, support=RewindSupport("free"))
            if model.head_tokens:
                HeadModel(target, model.head_tokens).close()
            target.close()
    finally:
        show_log(shown=False)
    logged = [(what, float(mib)) for what, mib in _LOGGED.findall(capfd.readouterr().err)]
    return sum(mib for what, mib in logged if what != "KV"), sum(mib for what, mib in logged if what == "KV")


def unmapped(name: str = MAINLINE[0], **given: Any) -> LoadOptions:
    path = str(FILES[name].path)
    return LoadOptions(threads=1, library=path, mmap=False, extra_buffer_types=False, **given)


def check(model: Contexts, path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    needed = [size / _MIB for size in model.needed(on_gpus=False)[HOST]]
    assert needed == pytest.approx(reported(model, path, capfd), abs=_ROUNDED)


@pytest.mark.parametrize("name", NATIVE)
def test_weights_and_kv_are_what_the_library_says(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path / "m.gguf", context_length=8192)
    check(Contexts(read_card(path).layout, unmapped(name, cache_type_k="q8_0"), 8192), path, capfd)


@pytest.mark.parametrize(
    ("arch", "heads"), [*((arch, 0) for arch in ARCHITECTURES), *((arch, 1) for arch in WITH_HEADS)]
)
def test_every_kind_is_counted(
    arch: str, heads: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path / "m.gguf", arch=arch, context_length=8192, mtp_layers=heads)
    check(Contexts(read_card(path).layout, unmapped(), 2048, head_tokens=2048 * heads), path, capfd)


def test_a_window_takes_no_less_than_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", arch="gemma3", context_length=8192)
    model = Contexts(read_card(path).layout, unmapped(full_window=False), 8192)
    _, kv = model.needed(on_gpus=False)[HOST]
    assert 0 < kv / _MIB < reported(model, path, capfd)[1]


def test_a_header_that_says_little_is_counted_with_what_it_says(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "odd.gguf", "unheard-of")
    for name in ("token_embd.weight", "blk.0.attn_k.weight", "blk.7.attn_k_b.weight", "blk.0.ssm_in.weight"):
        writer.add_tensor(name, np.zeros(4, dtype=np.float32))
    finish(writer)
    model = Contexts(read_card(tmp_path / "odd.gguf").layout, unmapped(), 8192)
    assert sum(model.needed(on_gpus=False)[HOST]) == 4 * 16


SIZES = Layout(
    name="big",
    tensors={
        "token_embd.weight": 2 * GB,
        **{f"blk.{i}.attn_q.weight": 4 * GB for i in range(4)},
        **{f"blk.{i}.ffn_up_exps.weight": 6 * GB for i in range(4)},
        "output.weight": 3 * GB,
    },
    layers=[Layer(125, 125)] * 4,
)
"""Layers of 10 GB, and KV of 500 bytes for each token and layer."""


@pytest.mark.parametrize(
    ("given", "host", "gpus"),
    [
        ({}, (0, 0), (43, 2)),
        ({"gpu_layers": 2}, (0, 1.5), (13, 0.5)),
        ({"gpu_layers": 1}, (0, 2), (3, 0)),
        ({"gpu_layers": 0}, (0, 2), (0, 0)),
        ({"devices": ("none",)}, (0, 2), (0, 0)),
        ({"kv_offload": False}, (0, 2), (43, 0)),
        ({"tensor_overrides": ("exps=CPU",)}, (0, 0), (19, 2)),
        ({"tensor_overrides": (r"blk\.0\..*exps=CUDA1", "exps=CPU")}, (0, 0), (25, 2)),
        ({"mmap": False, "gpu_layers": 2}, (32, 1.5), (13, 0.5)),
        ({"mlock": True, "gpu_layers": 0}, (45, 2), (0, 0)),
    ],
)
def test_weights_and_kv_lie_where_the_options_put_them(
    given: dict[str, Any], host: tuple[float, float], gpus: tuple[float, float]
) -> None:
    found = Contexts(SIZES, LoadOptions(**given), 10**6).needed(on_gpus=True)
    assert {place: tuple(size / GB for size in sizes) for place, sizes in found.items()} == {
        HOST: host,
        GPUS: gpus,
    }


SMALL = replace(SIZES, name="small", tensors={"blk.0.attn_q.weight": 5 * GB}, layers=[Layer(125, 125)])


@pytest.mark.parametrize(
    ("models", "free", "why", "way_out"),
    [
        (
            [Contexts(SIZES, LoadOptions(gpu_layers=0), 2 * 10**6)],
            {HOST: 2 * GB},
            "weights and KV cache take at least 0 MB and 4.00 GB, and 2.00 GB are free",
            "What would fit: a smaller context (-c: 999936 tokens over all requests).",
        ),
        (
            [Contexts(SIZES, LoadOptions())],
            {HOST: 100 * GB, GPUS: 24 * GB},
            "weights and KV cache take at least 43.0 GB and 0 MB on the GPUs, and 24.0 GB are free",
            "What would fit: 3 layers on the GPU (-ngl).",
        ),
        (
            [Contexts(SIZES, LoadOptions()), Contexts(SMALL, LoadOptions())],
            {HOST: 100 * GB, GPUS: 45 * GB},
            "take at least 48.0 GB",
            "What would fit: 4 layers on the GPU (-ngl); or no draft model (-md none).",
        ),
        (
            [Contexts(SIZES, LoadOptions(gpu_layers=0, mlock=True))],
            {HOST: 24 * GB},
            "take at least 45.0 GB",
            "What would fit: weights that are mapped (--mmap, without --mlock).",
        ),
        (
            [Contexts(SIZES, LoadOptions(gpu_layers=0), 10**6)],
            {HOST: 1.5 * GB},
            "2.00 GB",
            "What would fit: a smaller context (-c: 749824 tokens over all requests); or a smaller cache "
            "type (-ctk q8_0 -ctv q8_0).",
        ),
        (
            [Contexts(SIZES, LoadOptions(kv_offload=False), 10**6)],
            {HOST: 0, GPUS: 0},
            "take at least",
            "Choose a smaller quantization, or a smaller cache type (-ctk, -ctv).",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    models: list[Contexts], free: dict[str, float], why: str, way_out: str
) -> None:
    with pytest.raises(OutOfMemory) as caught:
        check_memory(models, free)
    assert why in caught.value.why and caught.value.way_out == way_out
    assert caught.value.what.startswith(" and ".join(model.layout.name for model in models))
    tokens = models[0].capacity_tokens
    assert caught.value.what.endswith(f" with a context of {tokens} tokens") == bool(tokens)


@given(
    layers=st.integers(-1, 5),
    tokens=st.integers(0, 10**7),
    host=st.integers(0, 60),
    gpus=st.none() | st.integers(1, 60),
)
def test_what_is_said_to_fit_does(layers: int, tokens: int, host: int, gpus: int | None) -> None:
    options = LoadOptions(gpu_layers=layers, mmap=False)
    model, free = Contexts(SIZES, options, tokens), {HOST: float(host * GB)}
    free |= {} if gpus is None else {GPUS: float(gpus * GB)}
    found = model.needed(on_gpus=GPUS in free)
    weights, kv = (sum(sizes) for sizes in zip(*found.values(), strict=True))
    assert weights == 45 * GB and kv == pytest.approx(2000 * tokens)  # nothing twice, nothing lost
    try:
        check_memory([model], free)
    except OutOfMemory as error:
        if context := re.search(r"-c: (\d+) tokens", error.way_out):
            check_memory([replace(model, capacity_tokens=int(context[1]))], free)
        if fewer := re.search(r"(\d+) layers", error.way_out):
            check_memory([replace(model, options=replace(options, gpu_layers=int(fewer[1])))], free)
            if int(fewer[1]) <= len(SIZES.layers):
                more = replace(options, gpu_layers=int(fewer[1]) + 1)
                with pytest.raises(OutOfMemory):
                    check_memory([replace(model, options=more)], free)


def test_nothing_is_loaded_that_cannot_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outrider: Call
) -> None:
    model = write_tiny(tmp_path / "target.gguf", context_length=8192)
    monkeypatch.setattr("outrider.backends.gguf.memory.available_bytes", lambda: 1e6)
    monkeypatch.setattr(
        "outrider.session.pair.load_weights", lambda *_args, **_options: pytest.fail("loaded")
    )
    done = outrider("run", "-m", str(model), "-c", "8192", "--raw", "-p", "hi")
    assert done.status == 2 and done.said.startswith(
        "error: target with a context of 8192 tokens: weights and KV cache take at least 0 MB and 2.1"
    )
    assert "What would fit: a smaller context (-c: " in done.said

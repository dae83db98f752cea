"""A plan as what other engines start from: vLLM, SGLang and llama.cpp's server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import SettingError
from outrider.planning.plan import Plan, Way, plan_batch
from outrider.planning.shapes import HEADS, ModelShape

_HEAD_NAME = "NAME-OF-THE-HEAD"
_NGRAM_MIN, _NGRAM_MAX = 2, 5
"""tokens of a match that vLLM's n-gram lookup takes"""
_CHECKPOINTS = ("int4", "awq", "gptq", "nvfp4", "mxfp4", "int8")
"""types of weights that an engine does not make by itself"""


@dataclass(frozen=True, slots=True)
class Export:
    """What an engine is started with. `config` is vLLM's --speculative-config, or the drafting flags of
    others with their values; None where the plan is to decode plainly. `notes` say what is predicted and what
    to know, a sentence each."""

    engine: str
    command: Sequence[str]
    config: Mapping[str, Any] | None
    notes: Sequence[str]

    @property
    def script(self) -> str:
        """The command as a shell script, with the notes as its comments."""
        lines = [f"# {note}" for note in self.notes]
        return "\n".join([*lines, shlex.join(self.command)]) + "\n"

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "engine": self.engine,
            "command": list(self.command),
            "config": self.config,
            "notes": list(self.notes),
        }


def export(plan: Plan, engine: str) -> Export:
    """What `engine` is started with for the first batch size of the plan. Raises SettingError for an engine
    that is not known."""
    if engine not in ENGINES:
        raise SettingError(engine, "no such engine is known", f"Choose one of {', '.join(ENGINES)}.")
    return ENGINES[engine](plan)


def _chosen(plan: Plan, joins: bool) -> Way | None:
    """The fastest way at the first batch size that pays, of those that the engine has."""
    ways = [way for way in plan.batches[0].ways if joins or way.drafting != "both"]
    best = max(ways, key=lambda way: way.speedup.value, default=None)
    return best if best is not None and best.speedup.value > 1 else None


def _names(plan: Plan) -> list[str]:
    return [model.name for model in (plan.asked.target, *plan.asked.drafts)]


def _shape(plan: Plan, name: str) -> ModelShape | None:
    models = (plan.asked.target, *plan.asked.drafts)
    return next((model.shape for model in models if model.name == name), None)


def _served(plan: Plan, name: str) -> str:
    shape = _shape(plan, name)
    return shape.hub if shape is not None and shape.hub else name


def _is_head(way: Way) -> bool:
    return way.draft in HEADS


def schedule(plan: Plan, way: Way, most: int) -> list[tuple[int, int, int]]:
    """The best draft length of one drafter by batch size, in ranges that begin at 1: (from, to, length), the
    length 0 where it does not pay."""
    found: list[tuple[int, int, int]] = []
    steps = (size for i in range(13) for size in (2**i, 3 * 2**i // 2))
    sizes = sorted({1, most, *(size for size in steps if size < most)})
    for size, beyond in zip(sizes, [*sizes[1:], most + 1], strict=True):
        best = plan_batch(plan.asked, size).best_of(way.drafting, way.draft)
        length = best.length if best is not None and best.speedup.value > 1 else 0
        if found and found[-1][2] == length:
            found[-1] = (found[-1][0], beyond - 1, length)
        else:
            found.append((size, beyond - 1, length))
    return found


def _most(plan: Plan) -> int:
    return max(batch.batch for batch in plan.batches)


def _notes(plan: Plan, way: Way | None, engine: str) -> list[str]:
    """What is predicted, and why."""
    batch = plan.batches[0]
    where = f" on {plan.asked.machine.name}" if plan.asked.machine else ""
    name = f"{plan.asked.target.name}{where}, {batch.batch} x {plan.asked.context} tokens"
    plain = f"{batch.plain_tokens_per_s:.0f} tokens/s plainly"
    if way is None:
        return [f"Outrider's plan for {engine}: {name}: {plain}; no draft is expected to pay."]
    found = [
        f"Outrider's plan for {engine}: {name}: {plain}, {way.tokens_per_s:.0f} with {way.name} drafting "
        f"{way.length} ({way.speedup.value:.2f}x): a prediction, not a measurement.",
        f"{way.tokens_per_call:.2f} tokens are expected of each target call.",
    ]
    if needed := batch.break_even.get(way.draft):
        found.append(f"{way.draft} pays from an acceptance of {needed[0]:.0%} of each token on.")
    if plan.pays_to is not None:
        found.append(
            f"Above {plan.pays_to} sequences at once drafting is expected to cost more than it gains."
        )
    if others := [name for name in _names(plan) if name.rpartition(":")[2] in _CHECKPOINTS]:
        found.append(f"{', '.join(others)}: name a checkpoint of that type, the one below has other weights.")
    if _is_head(way) and way.draft != "mtp":
        found.append(f"Put the head's own name in the place of {_HEAD_NAME}.")
    return found


def _devices(plan: Plan) -> int:
    return plan.asked.machine.count if plan.asked.machine else 1


def _quantization(shape: ModelShape | None) -> list[str]:
    """What has an engine make 8-bit weights of a checkpoint that comes in others."""
    return ["--quantization", "fp8"] if shape is not None and shape.name.endswith(":fp8") else []


def _vllm(plan: Plan) -> Export:
    way, most = _chosen(plan, joins=False), _most(plan)
    command = ["vllm", "serve", _served(plan, plan.asked.target.name)]
    if _devices(plan) > 1:
        command += ["--tensor-parallel-size", str(_devices(plan))]
    command += ["--max-model-len", str(plan.asked.context), "--max-num-seqs", str(most)]
    command += _quantization(_shape(plan, plan.asked.target.name))
    notes = _notes(plan, way, "vLLM")
    if way is None:
        return Export("vllm", command, None, notes)
    lengths = schedule(plan, way, most)
    config: dict[str, Any] = {"num_speculative_tokens": max(max(k for _, _, k in lengths), 1)}
    if way.drafting == "lookup":
        config |= {"method": "ngram", "prompt_lookup_min": _NGRAM_MIN, "prompt_lookup_max": _NGRAM_MAX}
    elif way.draft == "mtp":
        config |= {"method": "mtp"}
    elif _is_head(way):
        config |= {"method": way.draft, "model": _HEAD_NAME}
    else:
        config |= {"method": "draft_model", "model": _served(plan, way.draft)}
        if _devices(plan) > 1:
            config["draft_tensor_parallel_size"] = _draft_devices(plan, way)
        if quantization := _quantization(_shape(plan, way.draft)):
            config["quantization"] = quantization[1]
    if len(lengths) > 1:
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in lengths]
        notes.append(
            "Lengths by batch size are tried by vLLM with EAGLE heads and DFlash alone; leave out "
            "num_speculative_tokens_per_batch_size where its version refuses it."
        )
    notes.append("With a speculative config vLLM refuses requests with min_p or logit_bias.")
    command += ["--speculative-config", json.dumps(config)]
    return Export("vllm", command, config, notes)


def _draft_devices(plan: Plan, way: Way) -> int:
    """1 or all, as vLLM has it: where the draft's steps are faster."""
    from outrider.planning.calls import Machine, PlannedCurve

    draft = next(model for model in plan.asked.drafts if model.name == way.draft)
    if plan.asked.machine is None or not isinstance(draft.curve, PlannedCurve):
        return _devices(plan)
    one = Machine(plan.asked.machine.device)
    alone = PlannedCurve(draft.curve.shape, (one,)).call_s(1, context=plan.asked.context)
    shared = PlannedCurve(draft.curve.shape, (plan.asked.machine,)).call_s(1, context=plan.asked.context)
    return 1 if alone <= shared else _devices(plan)


def _sglang(plan: Plan) -> Export:
    way = _chosen(plan, joins=False)
    command = ["python", "-m", "sglang.launch_server", "--model-path", _served(plan, plan.asked.target.name)]
    if _devices(plan) > 1:
        command += ["--tp-size", str(_devices(plan))]
    command += ["--context-length", str(plan.asked.context), "--max-running-requests", str(_most(plan))]
    command += _quantization(_shape(plan, plan.asked.target.name))
    notes = _notes(plan, way, "SGLang")
    if way is None:
        return Export("sglang", command, None, notes)
    if way.drafting == "lookup":
        flags = {
            "--speculative-algorithm": "NGRAM",
            "--speculative-num-draft-tokens": str(way.length + 1),
            "--speculative-ngram-max-bfs-breadth": "1",  # a chain, as it is planned
        }
    else:
        names = {"mtp": "NEXTN", "eagle": "EAGLE", "eagle3": "EAGLE3"}
        flags = {"--speculative-algorithm": names.get(way.draft, "STANDALONE")}
        if way.draft != "mtp":
            served = _HEAD_NAME if _is_head(way) else _served(plan, way.draft)
            flags["--speculative-draft-model-path"] = served
        flags |= {
            "--speculative-num-steps": str(way.length),
            "--speculative-eagle-topk": "1",
            "--speculative-num-draft-tokens": str(way.length + 1),
        }
    command += [word for pair in flags.items() for word in pair]
    if plan.pays_to is not None and plan.pays_to < _most(plan):
        notes.append(
            "SGLang drafts at every batch size: start a second server without drafts for larger ones."
        )
    return Export("sglang", command, flags, notes)


def _llama_server(plan: Plan) -> Export:
    way, most = _chosen(plan, joins=True), _most(plan)
    command = ["llama-server", *_llama_model(plan, plan.asked.target.name, "-m", "-hf")]
    command += ["-c", str(plan.asked.context * most), "-np", str(most)]
    notes = _notes(plan, way, "llama-server")
    if way is None:
        return Export("llama-server", command, None, notes)
    flags: dict[str, str] = {}
    kinds = []
    if way.drafting != "lookup":
        kinds.append({"mtp": "draft-mtp", "eagle3": "draft-eagle3"}.get(way.draft, "draft-simple"))
        flags["--spec-draft-n-max"] = str(way.length)
        if way.draft != "mtp":
            name, value = _llama_model(plan, way.draft, "-md", "-hfd")
            flags[name] = _HEAD_NAME if _is_head(way) else value
    if way.drafting != "draft":
        kinds.append("ngram-simple")
        flags["--spec-ngram-simple-size-m"] = str(way.length)
    flags = {"--spec-type": ",".join(kinds), **flags}
    command += [word for pair in flags.items() for word in pair]
    shape = _shape(plan, plan.asked.target.name)
    if shape is not None and not shape.hub.endswith(".gguf"):
        notes.append(
            "llama-server takes GGUF files: name one of these models (-m FILE, or -hf OWNER/REPO:QUANT)."
        )
    return Export("llama-server", command, flags, notes)


def _llama_model(plan: Plan, name: str, file: str, hub: str) -> tuple[str, str]:
    served = _served(plan, name)
    return (file, served) if served.endswith(".gguf") else (hub, f"{served}-GGUF")


ENGINES: Mapping[str, Callable[[Plan], Export]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "llama-server": _llama_server,
}

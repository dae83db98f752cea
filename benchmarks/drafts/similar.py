"""Lookup where text is only similar: what nearest hidden states and recycled tokens would add to lookup.

    python benchmarks/drafts/similar.py states RECORDINGS.jsonl --model TARGET.gguf --out states.npz
    python benchmarks/drafts/similar.py replay RECORDINGS.jsonl --states states.npz --costs CURVE.json…

`states` runs the target over the stored prompts and answers once more and keeps, of every position, its final
hidden state (llama_get_embeddings_ith, 16 bits) and its most likely next token. `replay` asks what two
lookups would gain beside the one over the text itself:

- similar (AdaPLD): where nothing matches, what followed the place whose hidden state is nearest to that of
  the last evaluated token, by cosine, of the text so far;
- recycled (token recycling, a chain of its adjacency matrix): after each token what the target found most
  likely when it saw that token last, rejected or not.

First the hindsight bound with them, which no policy can exceed, and the automatic policy; then how often
their first token is right where the lookup over the text has nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, append, describe, geometric_mean, run_program, table
from outrider.core.contracts import Drafter, DraftRequest
from outrider.core.data import Request
from outrider.costs import CallCosts
from outrider.drafters.lookup import LookupDrafter, Match
from outrider.drafters.suffix import SuffixDrafter
from outrider.lab.recording import Recording, read_recordings
from outrider.lab.replay import hindsight_bound, replay
from outrider.lab.replay.run import SAMPLER
from outrider.policy import AutoPolicy
from policy.ahead import Everything
from policy.curves import read_costs

CHUNK = 256
Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]


def states(recording: Recording, model: object) -> tuple[npt.NDArray[np.float16], Tokens]:
    """Of every position of prompt and answer: its final hidden state, and the most likely next token."""
    import llama_cpp

    context = model._ctx.ctx  # type: ignore[attr-defined]
    width, size = model.n_embd(), model.n_vocab()  # type: ignore[attr-defined]
    text = [*recording.prompt, *recording.tokens]
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    rows: list[npt.NDArray[np.float16]] = []
    best: list[int] = []
    for start in range(0, len(text), CHUNK):
        chunk = text[start : start + CHUNK]
        batch = llama_cpp.llama_batch_init(len(chunk), 0, 1)
        batch.n_tokens = len(chunk)
        for i, token in enumerate(chunk):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, True
        failed = llama_cpp.llama_decode(context, batch)
        llama_cpp.llama_batch_free(batch)
        if failed:
            raise OSError(f"{recording.id}: the call failed ({failed})")
        for i in range(len(chunk)):
            found = llama_cpp.llama_get_embeddings_ith(context, i)
            rows.append(np.array(np.ctypeslib.as_array(found, shape=(width,)), dtype=np.float16))
            logits = llama_cpp.llama_get_logits_ith(context, i)
            best.append(int(np.ctypeslib.as_array(logits, shape=(size,)).argmax()))
    return np.array(rows), np.array(best, dtype=np.int64)


def write_states(recordings: Sequence[Recording], path: Path, out: Path) -> None:
    import llama_cpp

    options = {
        "n_ctx": 4096,
        "n_batch": CHUNK,
        "n_ubatch": CHUNK,
        "n_threads": 1,
        "n_threads_batch": 1,
        "verbose": False,
    }
    kinds = {"embedding": True, "pooling_type": llama_cpp.LLAMA_POOLING_TYPE_NONE, "logits_all": True}
    model = llama_cpp.Llama(str(path), **options, **kinds)
    found: dict[str, npt.NDArray[np.generic]] = {}
    for number, recording in enumerate(recordings):
        found[f"states {recording.id}"], found[f"next {recording.id}"] = states(recording, model)
        print(f"{number + 1} of {len(recordings)}: {recording.id}", file=sys.stderr)
    np.savez(out, **found)  # type: ignore[arg-type]


class CopyReader:
    """Goes on from a place of a text, as long as what it reads is what stands there."""

    def __init__(self, text: Sequence[int], place: int | None, weight: int) -> None:
        self._text, self._place, self._weight = text, place, weight

    def read(self, token: int) -> None:
        place = self._place
        matches = place is not None and place < len(self._text) and self._text[place] == token
        self._place = place + 1 if place is not None and matches else None

    def find(self) -> Match | None:
        if self._place is None or self._place >= len(self._text):
            return None
        return Match(self._text[self._place], self._weight, 1, 1, len(self._text) - self._place)


@dataclass
class _Seen:
    """The text so far of the one sequence there is."""

    text: list[int] = field(default_factory=list)

    def begin(self, sequence: int, request: Request) -> None:
        del sequence
        self.text = list(request.prompt)

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        del sequence
        self.text += tokens

    def end(self, sequence: int) -> None:
        del sequence

    def reset(self) -> None:
        self.text = []


class SimilarDrafter(_Seen, LookupDrafter):
    """What followed the most similar place: `rows` are all positions' states, of length 1."""

    name = "similar"

    def __init__(self, rows: Floats) -> None:
        super().__init__()
        self._rows = rows

    def _reader(self, sequence: int) -> CopyReader | None:
        del sequence
        last = len(self.text) - 2  # the last token is not evaluated yet
        if last < 1:
            return None
        cosines = self._rows[:last] @ self._rows[last]
        place = int(cosines.argmax())
        # The evidence of a lookup has a match length: the nearer the states, the longer.
        return CopyReader(self.text, place + 2, 1 + int(8 * max(float(cosines[place]), 0.0)))


class RecycledReader:
    def __init__(self, after: dict[int, int], last: int) -> None:
        self._after, self._last = after, last

    def read(self, token: int) -> None:
        self._last = token

    def find(self) -> Match | None:
        token = self._after.get(self._last)
        return None if token is None else Match(token, 1, 1, 1, 1)


class RecycledDrafter(_Seen, LookupDrafter):
    """What the target found most likely after each token when it saw that last."""

    name = "recycled"

    def __init__(self, best: Tokens) -> None:
        super().__init__()
        self._best = best
        self._after: dict[int, int] = {}

    def begin(self, sequence: int, request: Request) -> None:
        super().begin(sequence, request)
        self._after = {}
        self._learn(0)

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        start = len(self.text) - 1
        super().observe(sequence, tokens)
        self._learn(start)

    def _learn(self, start: int) -> None:
        # The text's last token is not evaluated yet.
        for place in range(start, len(self.text) - 1):
            self._after[self.text[place]] = int(self._best[place])

    def _reader(self, sequence: int) -> RecycledReader:
        del sequence
        return RecycledReader(self._after, self.text[-1])


class Data:
    """The states of each recording, less their mean, of length 1."""

    def __init__(self, path: Path) -> None:
        self._arrays = np.load(path)

    def drafters(self, recording: Recording, ways: Sequence[str]) -> list[Drafter]:
        found: list[Drafter] = [SuffixDrafter()]
        if "similar" in ways:
            rows = self._arrays[f"states {recording.id}"].astype(np.float32)
            rows -= rows[: len(recording.prompt)].mean(axis=0)  # else all point the same way
            found.append(SimilarDrafter(rows / np.linalg.norm(rows, axis=1, keepdims=True)))
        if "recycled" in ways:
            found.append(RecycledDrafter(self._arrays[f"next {recording.id}"]))
        return found


WAYS: dict[str, tuple[str, ...]] = {
    "lookup": (),
    "similar": ("similar",),
    "recycled": ("recycled",),
    "all": ("similar", "recycled"),
}


def measure(recordings: Sequence[Recording], data: Data, curve: Path) -> Iterator[Row]:
    """Seconds of each recording: plainly, by the bound and by the automatic policy, for each way."""
    costs = read_costs(curve).target
    for way, names in WAYS.items():
        policy = AutoPolicy(CallCosts.from_json(costs.as_json()))
        for recording in recordings:
            bound_s = hindsight_bound(recording, costs, free=data.drafters(recording, names))
            done = replay(recording, policy, costs, free=data.drafters(recording, names))
            yield {
                "kind": "replay",
                "curve": curve.stem,
                "way": way,
                "id": recording.id,
                "category": recording.category,
                "plain_s": done.plain_s,
                "bound_s": bound_s,
                "auto_s": done.seconds,
            }


def tables(rows: Sequence[Row]) -> Iterator[str]:
    for curve in dict.fromkeys(row["curve"] for row in rows):
        mine = [row for row in rows if row["curve"] == curve]
        by = {(row["way"], row["id"]): row for row in mine}
        categories = dict.fromkeys(row["category"] for row in mine)
        lines = []
        for category in (*categories, "all"):
            ids = dict.fromkeys(row["id"] for row in mine if category in (row["category"], "all"))
            line = [category, str(len(ids))]
            for what in ("bound_s", "auto_s"):
                for way in WAYS:
                    ratio = geometric_mean(by[way, i]["plain_s"] / by[way, i][what] for i in ids)
                    line.append(f"{ratio:.3f}")
            lines.append(line)
        header = [curve, "texts", *(f"bound, {way}" for way in WAYS), *(f"auto, {way}" for way in WAYS)]
        yield from table(header, lines)


def precision(recordings: Sequence[Recording], data: Data) -> Iterator[Row]:
    """Where the lookup over the text finds nothing: how often the others are right, by their evidence."""
    found: dict[tuple[str, float], list[bool]] = {}
    for recording in recordings:
        drafters = data.drafters(recording, WAYS["all"])
        for drafter in drafters:
            drafter.begin(0, Request(recording.prompt))
        for token in recording.tokens:
            request = DraftRequest(0, 1, SAMPLER)
            [[lookup], *others] = [drafter.propose([request], Everything())[0] for drafter in drafters]
            for drafter, [offer] in zip(drafters[1:], others, strict=True):
                if offer and not lookup:
                    key = (drafter.name, offer.estimates[0].evidence[0])
                    found.setdefault(key, []).append(offer.tokens[0] == token)
            for drafter in drafters:
                drafter.observe(0, (token,))
    for (way, evidence), right in sorted(found.items()):
        cosine = (evidence - 1) / 8 if way == "similar" else None
        yield {"kind": "offers", "way": way, "cosine": cosine, "offers": len(right), "right": sum(right)}


def precision_table(rows: Sequence[Row]) -> Iterator[str]:
    lines = []
    for row in rows:
        cosine = "" if row["cosine"] is None else f"{row['cosine']:.2f} and more"
        lines.append([row["way"], cosine, str(row["offers"]), f"{row['right'] / row['offers']:.0%}"])
    yield from table(["where lookup has nothing", "cosine", "offers", "right"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("states", "replay"))
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--states", type=Path)
    parser.add_argument("--costs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    recordings = [r for path in options.recordings for r in read_recordings(path) if len(r.tokens) > 1]
    if options.what == "states":
        write_states(recordings, options.model, options.out)
        return
    data, rows = Data(options.states), list[Row]()
    for curve in options.costs:
        rows += measure(recordings, data, curve)
    offers = list(precision(recordings, data))
    if options.out:
        append(options.out, describe(), *rows, *offers)
    print("\n".join([*tables(rows), *precision_table(offers)]))


if __name__ == "__main__":
    run_program(main)

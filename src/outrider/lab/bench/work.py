"""The work on one target, in pieces: a sweep does them one after the other, an executor does them elsewhere.

Every piece does only what has no row yet, so one that was cut off is simply begun again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from outrider.backends.gguf import physical_cores
from outrider.core.errors import BackendError, InputError
from outrider.lab.bench.contestants import Contestant, ContestantError
from outrider.lab.bench.ledger import MIN_TOKENS
from outrider.lab.bench.quality import Reference
from outrider.lab.bench.rounds import Rounds
from outrider.lab.bench.stages import Stages
from outrider.lab.models import OWN_HEAD, ModelFile
from outrider.lab.rows import AnswerRow, DoneRow, QualityRow


@dataclass(frozen=True, slots=True)
class TargetWork:
    """What is to be found out about a target that is loaded, `file`."""

    stages: Stages
    file: ModelFile

    def record(self) -> bool:
        """Its answers; False when there are none to go on with."""
        self.stages.record()
        if self.stages.ledger.all_cases():
            return True
        why = f"it answered none of the prompts with {MIN_TOKENS} tokens or more"
        self.stages.ledger.skip(self.file.name, why)
        return False

    def quality(self, folder: Path, reference: str, *, is_compared: bool) -> None:
        """Keep the distributions of the target `reference` in `folder`, or compare with them: one pass over
        its texts. They are kept where something `is_compared` with them."""
        stages, name, kept = self.stages, self.stages.name, Reference(folder, reference)
        rows = stages.ledger.rows
        answers = [row for row in rows if isinstance(row, AnswerRow) and row.target == reference]
        stages.meter.say("scoring", f"{name} as a quantization of {reference}")
        try:
            if name == reference:
                if is_compared:
                    kept.save(stages.target.model, answers)
                return
            known = {(row.workload, row.case) for row in stages.ledger.of(QualityRow)}
            missing = [row for row in answers if (row.workload, row.case) not in known]
            for found in kept.compared(stages.target.model, name, missing):
                stages.ledger.append(found)
        except (InputError, BackendError) as error:
            stages.ledger.skip(f"quality of {name}", f"{error.what}: {error.why}")

    def score(self, drafts: Sequence[ModelFile]) -> None:
        """What those drafts offer that the target can have, and what they cost."""
        stages, name = self.stages, self.file.name
        if not stages.can_draft:
            why = "it cannot take tokens back (recurrent or hybrid state): it decodes plainly"
            stages.ledger.skip(f"drafts and lookup for {name}", why)
        if OWN_HEAD in stages.plan.drafts and self.file.card.own_head is None:
            stages.ledger.skip(f"{OWN_HEAD} for {name}", "its file has no head of its own")
        for draft in drafts:
            if draft.fingerprint == self.file.fingerprint and not draft.is_head:
                stages.ledger.skip(f"{draft.name} for {name}", "it is the target itself")
            elif stages.can_draft:
                stages.score(draft)
            stages.meter.expect(f"score {draft.name}", 0)

    def replay(self) -> None:
        """Every setting over the recorded answers, without a draft model and with each that was scored."""
        stages, lookup_only = self.stages, self.stages.plan.lookup_only
        if stages.can_draft and not stages.drafts and not lookup_only:
            why = "no draft is left, and lookup_only is off"
            stages.ledger.skip(f"real runs of {self.file.name}", why)
        for name in [*([None] if lookup_only or not stages.can_draft else []), *stages.drafts]:
            stages.predict(name)

    def run(self, drafts: Sequence[ModelFile], is_over: Callable[[], bool]) -> None:
        """The chosen settings and the other engines for real; a row says when all is done."""
        with ExitStack() as stack:
            if Rounds(self.stages, [*self._rivals(stack, drafts)], is_over).run():
                self.stages.ledger.append(DoneRow(target=self.file.name))

    def _rivals(self, stack: ExitStack, drafts: Sequence[ModelFile]) -> Iterator[Contestant]:
        """Other engines that start; one that needs a draft model is started with each."""
        stages, file = self.stages, self.file
        for spec in stages.plan.contestants:
            wanting = spec.command is not None and "{draft}" in spec.command
            usable = [draft for draft in drafts if draft.name in stages.drafts and not draft.is_head]
            if wanting and not usable:
                what = f"{spec.name} with {file.name}"
                stages.ledger.skip(what, "its command wants a draft model, and there is none for this target")
            for draft in usable if wanting else [None]:
                name = spec.name if draft is None or len(usable) == 1 else f"{spec.name} ({draft.name})"
                stages.meter.say("starting", name)
                try:
                    engine = Contestant(
                        spec,
                        file.path,
                        None if draft is None else draft.path,
                        context=stages.target.model.context_length,
                        threads=stages.plan.threads or physical_cores(),
                    )
                except ContestantError as error:
                    lines = [line.strip() for line in error.way_out.splitlines() if line.strip()]
                    last = lines[-1] if lines else "no more is known"
                    stages.ledger.skip(f"{name} with {file.name}", f"{error.why} ({last})")
                    continue
                engine.name = name
                yield stack.enter_context(engine)

"""The policy that decides by itself: expected tokens against measured seconds, at every step anew.

A step that emits g tokens in s seconds gains g * token_s - s, where `token_s` is what a token takes on
the whole lately: maximising that difference maximises tokens per second over the text, which maximising
each step's own ratio would not (Dinkelbach, "On nonlinear fractional programming", 1967).

Free drafters (lookups, grammars) are asked first. A draft model is asked while its next token is worth
its step. Free tokens may stand in front of the model's or behind them: a match that the model agrees
with is worth taking whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.core.contracts import Drafter, Wish
from outrider.core.data import Draft, DraftWork, Hint, StepRecord
from outrider.core.errors import SettingError
from outrider.costs import CallCosts
from outrider.policy.knowledge import Knowledge, Text
from outrider.policy.step import Step

__all__ = ["AutoPolicy"]

LONGEST_DRAFT = 64
"""tokens; V(n) is measured as far"""
EXPLORATION = 0.02
"""share of a text's time that may go to asking a draft model that is not expected to pay"""


class AutoPolicy:
    """Drafts from whom and as far as it pays on this machine, for this text, at this position.

    `costs` are those of the target's calls, `draft_costs` those of each draft model's by the drafter's
    name; both go on learning from every step, and so do the estimates of acceptance. `free` and
    `models` switch the drafters of that kind on and off; `draft_max` caps the drafted tokens of a step.

    Raises SettingError for a cap out of range.
    """

    def __init__(
        self,
        costs: CallCosts | None = None,
        draft_costs: Mapping[str, CallCosts] | None = None,
        *,
        free: bool = True,
        models: bool = True,
        draft_max: int = LONGEST_DRAFT,
    ) -> None:
        if draft_max < 0:
            raise SettingError("draft max", f"{draft_max} is negative", "Give 0 (off) or more.")
        self.knowledge = Knowledge(costs or CallCosts(), draft_costs or {})
        self.free = free
        self.models = models
        self.draft_max = draft_max
        self.notices: list[str] = []
        """what the user should hear once: a draft model that cannot pay, calls that have become slower"""
        self._texts: dict[int, Text] = {}
        self._hopeless: set[str] = set()

    def begin(self, sequence: int, prompt_tokens: int, max_tokens: int | None) -> None:
        """A request starts: what was particular to the last text of the sequence is forgotten."""
        self._texts[sequence] = self.knowledge.new_text(prompt_tokens, max_tokens)

    def propose(self, drafters: Sequence[Drafter], wishes: Sequence[Wish]) -> tuple[list[Draft], DraftWork]:
        """One draft per wish: what is expected to bring the most tokens per second."""
        longest = min(self.draft_max, LONGEST_DRAFT)
        if longest == 0:
            return [Draft() for _ in wishes], DraftWork()
        free = [drafter for drafter in drafters if drafter.is_free and self.free]
        models = [drafter for drafter in drafters if not drafter.is_free and self.models]
        steps = [Step(self.knowledge, self._text(w.sequence), w, free, longest) for w in wishes]
        asking: dict[str, list[Step]] = {model.name: [] for model in models}
        taken = len(steps)  # every sequence has a token of its own in the call
        for step in steps:
            name = self._choose(step, models, taken - 1, len(steps))
            if name is not None:
                asking[name].append(step)
            taken += len(step.lead)
        work = DraftWork()
        for model in models:
            if turn := asking[model.name]:
                offers, cost = model.propose([step.wish for step in turn], _Steering(turn))
                work += cost
                for step, offer in zip(turn, offers, strict=True):
                    step.offer = offer
        return [step.draft() for step in steps], work

    def _text(self, sequence: int) -> Text:
        if sequence not in self._texts:
            self.begin(sequence, 1, None)
        return self._texts[sequence]

    def _choose(self, step: Step, models: Sequence[Drafter], others: int, num_sequences: int) -> str | None:
        """The draft model that this sequence asks, told how; None for none."""
        if not self.knowledge.costs.is_known:
            models = ()  # the first call of all tells what a call takes
        best: tuple[float, str, int] | None = None
        for model in models:
            step.price(model.name, others, num_sequences)
            lead = step.weigh()
            worth = step.gain_s > 0 and step.repays_reading(model.name) and step.may_risk()
            if not worth and self._may_explore(step, model.name):
                lead, worth = 0, True
            if worth and (best is None or step.gain_s > best[0]):
                best = (step.gain_s, model.name, lead)
        if best is None:
            step.price(None, others, num_sequences)
            return None
        if len(models) > 1:
            step.price(best[1], others, num_sequences)
        step.ask(best[1], best[2])
        return best[1]

    def _may_explore(self, step: Step, model: str) -> bool:
        """Whether finding out how sure the draft model is here is within the bounds."""
        if not self.knowledge.can_pay(model, step.context):
            self._give_up(model)
            return False
        cost_s = step.reading_s(model) + max(-step.gain_s, 0.0)
        return step.explores(cost_s, EXPLORATION)

    def _give_up(self, model: str) -> None:
        """Say once that a draft model cannot pay here, however sure it is."""
        knowledge = self.knowledge
        if model in self._hopeless or not (knowledge.costs.is_known and knowledge.draft_cost(model).is_known):
            return
        self._hopeless.add(model)
        share = knowledge.draft_cost(model).call_s(1, context=0) / knowledge.costs.call_s(1, context=0)
        self.notices.append(
            f"{model}: a step of it takes {share:.2f} of a target step here, too much to pay even if it were "
            "always right: it stays out"
        )

    def observe(self, records: Mapping[int, StepRecord]) -> None:
        """Learn what calls cost and what drafts were worth."""
        if not records:
            return
        self.knowledge.learn_costs(list(records.values()))
        for sequence, record in records.items():
            if record.kind == "decode" and sequence in self._texts:
                self.knowledge.learn_text(self._texts[sequence], record)
        for costs in (self.knowledge.costs, *self.knowledge.draft_costs.values()):
            if notice := costs.notice():
                self.notices.append(notice)


class _Steering:
    """How far a draft model drafts for each of the sequences that ask it."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = {step.wish.sequence: step for step in steps}

    def wants(self, wish: Wish, drafted: Sequence[int]) -> bool:
        return self._steps[wish.sequence].wants(drafted)

    def takes(self, wish: Wish, drafted: Sequence[int], hint: Hint) -> bool:
        del drafted
        return self._steps[wish.sequence].takes(hint)

"""Finds and loads the models of a sweep, and measures what their calls cost."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.model import GgufModel
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning.scoring import costs_of
from outrider.core.errors import SettingError
from outrider.core.notices import collect_notices
from outrider.costs import CallCosts
from outrider.costs.calibrate import Rows
from outrider.costs.store import import_costs
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.loaded import Loaded, LoadedDraft, LoadedTarget
from outrider.lab.models import ModelFile, find_models
from outrider.lab.prompts import Workload
from outrider.lab.rows import ModelRow, PairRow, Role
from outrider.lab.subject import pair_row
from outrider.models.hub import HubOptions
from outrider.models.vocab import compare
from outrider.session.loading import in_same_library, why_no_draft

DEFAULT_CONTEXT_TOKENS = 4096
_ROOM_TOKENS = 8
"""of a context beyond the longest text: a call's draft is cut to what is left of it"""


class Loader:
    """The models of a sweep through their native library."""

    def __init__(self, plan: SweepPlan, workloads: Sequence[Workload], hub: HubOptions) -> None:
        self._plan = plan
        self._hub = hub
        self._context = plan.context or _context(workloads)

    def find(self, references: Sequence[str], taken: Sequence[ModelFile] = ()) -> list[ModelFile]:
        """Raises ModelFileError and HubError, which name the reference that leads nowhere."""
        return find_models(references, hub=self._hub, taken=taken)

    def check_backend(self, backend: str) -> None:
        """Raises BackendError where no library here is of this backend."""
        next(candidates(self._plan.load_options(backend)))

    def target(self, file: ModelFile) -> tuple[LoadedTarget, ModelRow]:
        """Raises ModelFileError or OutOfMemory."""
        with collect_notices() as notices:
            loaded = Loaded(file, self._plan.load_options(file.backend))
            model = self._open(loaded)
        return LoadedTarget(file.name, model, loaded.template), loaded.row("target", notices)

    def draft(self, file: ModelFile, target: LoadedTarget) -> tuple[LoadedDraft, ModelRow] | PairRow:
        """Raises ModelFileError or OutOfMemory."""
        with collect_notices() as notices, ExitStack() as stack:
            loaded = stack.enter_context(Loaded(file, self._draft_options(target), beside=target.model))
            alignment = compare(target.model.vocabulary, loaded.weights.vocabulary)
            useless = loaded.why_not or None
            if isinstance(target.model, GgufModel) and not file.is_head:
                useless = why_no_draft(target.model.weights, loaded.weights)
            row = pair_row(target.name, file.name, alignment.report, why_not=useless)
            if not row.usable:
                return row
            if file.is_head:  # in a context of the target's own size
                loaded.open(target.model.context_length)
            else:
                self._open(loaded)
            draft = loaded.draft(alignment)
            stack.pop_all()  # it is the caller's now
        return draft, loaded.row("draft", notices, target.name)

    def _open(self, loaded: Loaded) -> GgufModel:
        """A context for the longest text and the draft after it; 0: as trained."""
        try:
            longest = self._context and min(self._context + _ROOM_TOKENS, loaded.weights.trained_context)
            return loaded.open(longest)
        except BaseException:
            loaded.close()
            raise

    def _draft_options(self, target: LoadedTarget) -> LoadOptions:
        """Of several backends a draft takes its target's, nothing else."""
        if len(self._plan.backends) == 1 or not isinstance(target.model, GgufModel):
            return self._plan.load_options(self._plan.backends[0])
        return in_same_library(target.model.options, self._plan.load_options("auto"))

    def costs(self, model: LoadedTarget | LoadedDraft, role: Role) -> CallCosts:
        """Measured now, or those of the plan's file. Raises SettingError, or BackendError when a call
        fails."""
        if self._plan.costs is not None:
            pair = import_costs(self._plan.costs)
            curve = pair.target if role == "target" else pair.draft
            if curve is None:
                why = "it has no costs of a draft model"
                raise SettingError(str(self._plan.costs), why, "Write one with -md.")
            return curve
        assert isinstance(model.model, GgufModel), "it was loaded from a file"
        rows: Rows = "all" if role == "target" else "last"
        return costs_of(model.model, rows=rows, fresh=True)


def _context(workloads: Sequence[Workload]) -> int:
    """Enough for what is asked, by a token for every two characters, and no less than is usual."""
    needed = [DEFAULT_CONTEXT_TOKENS]
    for workload in workloads:
        for prompt in workload.prompts:
            asked = [repr(prompt.messages), repr(prompt.tools), *prompt.follow_ups]
            answers = (1 + len(prompt.follow_ups)) * (prompt.max_tokens or workload.max_tokens)
            needed.append(sum(map(len, asked)) // 2 + answers)
    return max(needed)

"""Whether two tokenizers can line up, by the headers of their files: a pair that cannot is refused before
anything is loaded. Whether they cut text alike shows once both are loaded (`vocab`)."""

from __future__ import annotations

from outrider.models.constants import Keys, TokenType
from outrider.models.gguf import ModelCard
from outrider.models.header import fields_of, read_header
from outrider.models.vocab.alignment import MIN_TEXT_RATIO, SHOWN_DIFFERENCES, too_few_in_common

_CONTROL = (int(TokenType.CONTROL), int(TokenType.UNUSED))


def check_tokenizers(target: ModelCard, draft: ModelCard) -> None:
    """Raise VocabularyMismatch where too few spellings of text tokens are the target's. A file that has no
    tokens is passed over, and a reduced vocabulary, whose map is read when it is loaded."""
    if target.tokens is None or draft.tokens is None or draft.has_reduced_vocabulary:
        return
    (ours, our_texts), (theirs, their_texts) = _tokens(target), _tokens(draft)
    if ours == theirs:
        return
    texts, own, others = (
        (our_texts, ours, theirs) if len(our_texts) < len(their_texts) else (their_texts, theirs, ours)
    )
    spellings = set(others)
    lacking = [i for i in texts if own[i] not in spellings]
    if len(lacking) > (1 - MIN_TEXT_RATIO) * len(texts):
        examples = [
            f"token {i} is {_shown(ours, i)} in the target, {_shown(theirs, i)} in the draft"
            for i in lacking[:SHOWN_DIFFERENCES]
        ]
        num_common = len(texts) - len(lacking)
        raise too_few_in_common(target.tokenizer, draft.tokenizer, num_common, len(texts), examples)


def _tokens(card: ModelCard) -> tuple[list[bytes], list[int]]:
    keys = (Keys.Tokenizer.LIST, Keys.Tokenizer.TOKEN_TYPE)
    fields = fields_of(card.path, read_header(card.path), keys)
    tokens: list[bytes] = fields[Keys.Tokenizer.LIST].value
    kinds = fields[Keys.Tokenizer.TOKEN_TYPE].value if Keys.Tokenizer.TOKEN_TYPE in fields else []
    is_control = [kind in _CONTROL for kind in kinds] or [False] * len(tokens)
    return tokens, [i for i, control in enumerate(is_control[: len(tokens)]) if not control]


def _shown(tokens: list[bytes], token: int) -> str:
    return repr(tokens[token].decode(errors="replace")) if token < len(tokens) else "nothing"

"""How a tokenizer cuts text: what two of them have in common there, and a name for one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

from outrider.core.contracts import Vocabulary

_SAMPLES = (
    "The committee hadn't decided whether it's worth it; they'll meet again on Thursday, I'm told.",
    'Unbelievably, antidisestablishmentarianism re-emerged: "Why not?" she asked -- and left.',
    "def mean(xs: list[float]) -> float:\n    if not xs:\n        raise ValueError('empty')\n"
    "    return sum(xs) / len(xs)  # the average\n",
    "for (int i = 0; i < n; ++i) {\n\t\tbuf[i] ^= key[i % 16] << 3;\n\t}\r\n\r\n#include <stdio.h>\n",
    "In 1969, 600 million people watched; pi is 3.14159265, call +44 20 7946 0958 at 07:45.",
    '{"id": 40213, "tags": ["new", "sale"], "price": 19.90, "nested": {"ok": true, "none": null}}',
    "Der Straßenbahnfahrer grüßte höflich, ça va très bien, ¿qué pasó mañana? Zażółć gęślą jaźń.",
    "Съешь ещё этих мягких булок. Γρήγορη αλεπού πηδάει. מה שלומך היום? كيف حالك اليوم؟",
    "今天天气很好。我们去公园散步吧。吾輩は猫である。名前はまだ無い。 안녕하세요, 반갑습니다.",
    "नमस्ते दुनिया, สวัสดีชาวโลก, გამარჯობა",
    "Ship it 🚀🎉! Family 👨‍👩‍👧, flag 🇫🇷, thumbs 👍🏽 and a heart ❤️.",
    "a  b   c    d\n\n\n\te\t\tf   \n  g     \n\n    h",
    "<div class=\"row\"><a href='https://example.org/a_b?c=1&d=%20'>link</a></div> | **bold** | $x^2$",
)


@dataclass(frozen=True, slots=True)
class Cuts:
    """How two tokenizers cut the sample texts: pieces of the finer cut, and those in both."""

    common_pieces: int
    pieces: int

    @property
    def ratio(self) -> float:
        """Common pieces / pieces, 0-1; 1 where nothing was cut."""
        return self.common_pieces / self.pieces if self.pieces else 1.0

    @property
    def alike(self) -> bool:
        """Whether every sample text falls into the same pieces on both sides."""
        return self.common_pieces == self.pieces


def compare_cuts(target: Vocabulary, draft: Vocabulary) -> Cuts:
    """How two tokenizers cut some text of many kinds."""
    common = total = 0
    for text in _SAMPLES:
        ours, theirs = set(_spans(target, text)), set(_spans(draft, text))
        common += len(ours & theirs)
        total += max(len(ours), len(theirs))
    return Cuts(common, total)


def _spans(vocabulary: Vocabulary, text: str) -> Iterator[tuple[int, bytes]]:
    """Each piece of a text with its distance in bytes from the text's end.

    From the end, because some tokenizers put a blank before the first word.
    """
    end = 0
    for token in reversed(vocabulary.tokenize(text, add_special=False)):
        piece = vocabulary.piece(token)
        yield end, piece
        end += len(piece)


def tokenizer_id(vocabulary: Vocabulary) -> str:
    """A name for a tokenizer: tokenizers of the same one give the same tokens for the same text.

    It is a hash of the tokenizer's kind, the spelling of all its tokens and how it cuts some text. Files hold
    such names: indexed corpora, and drafts with a reduced vocabulary.
    """
    digest = sha256(vocabulary.kind.encode())
    for token in range(vocabulary.size):
        spelling = vocabulary.spelling(token)
        digest.update(b"%d:" % len(spelling) + spelling)
    for text in _SAMPLES:
        digest.update(repr(list(vocabulary.tokenize(text, add_special=False))).encode())
    return digest.hexdigest()

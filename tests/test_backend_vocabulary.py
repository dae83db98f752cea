"""Vocabularies on every native library, and the libraries' log."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny_gguf
from backends import FILES, NATIVE, Native, backend, over_native
from outrider.core.errors import PromptError, SettingError
from tiny_gguf import BEGIN, END, write_tiny

__all__ = ["backend"]  # pytest finds the fixture by its name

# Vocabulary

texts = st.text(st.characters(codec="utf-8"), max_size=40)


@over_native
def test_text_survives_tokenizing(backend: Native) -> None:
    vocabulary = backend.weights().vocabulary

    @given(texts)
    def check(text: str) -> None:
        tokens = vocabulary.tokenize(text)
        assert b"".join(vocabulary.piece(token) for token in tokens) == text.encode()
        assert all(0 <= token < vocabulary.size for token in tokens)

    check()


@pytest.mark.skipif(len(NATIVE) < 2, reason="compares libraries")
def test_all_libraries_read_text_alike(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tiny")
    vocabularies = [Native(file, folder).weights().vocabulary for file in FILES.values()]

    @given(texts, st.booleans())
    def check(text: str, parse_special: bool) -> None:
        text = text.replace("<", END)
        one, *others = (v.tokenize(text, parse_special=parse_special) for v in vocabularies)
        assert all(other == one for other in others)

    check()
    one, *others = vocabularies
    for token in range(one.size):
        for other in others:
            assert other.piece(token) == one.piece(token) and other.spelling(token) == one.spelling(token)
            assert other.is_control(token) == one.is_control(token)
            assert other.ends_generation(token) == one.ends_generation(token)


@over_native
def test_control_tokens_are_read_only_when_asked(backend: Native) -> None:
    vocabulary = backend.weights().vocabulary
    end = vocabulary.tokenize(END, parse_special=True)
    assert end == [vocabulary.eos] and vocabulary.spelling(end[0]) == END.encode()
    spelled_out = vocabulary.tokenize(f"a{END}b")
    assert vocabulary.eos not in spelled_out
    assert b"".join(map(vocabulary.piece, spelled_out)) == f"a{END}b".encode()
    parsed = vocabulary.tokenize(f"a{END}b", parse_special=True)
    assert parsed == [*vocabulary.tokenize("a"), vocabulary.eos, *vocabulary.tokenize("b")]


@over_native
def test_a_vocabulary_says_what_its_tokens_are(backend: Native, tmp_path: Path) -> None:
    weights = backend.fresh(tmp_path, padding=3)
    vocabulary = weights.vocabulary
    spelled = tiny_gguf.vocabulary(padding=3)
    assert vocabulary.size == len(spelled)
    assert [vocabulary.spelling(i).decode() for i in range(vocabulary.size)] == spelled
    assert vocabulary.kind == "bpe (gpt-2)" and not vocabulary.adds_bos
    controls = [i for i in range(vocabulary.size) if vocabulary.is_control(i)]
    assert [spelled[i] for i in controls] == [BEGIN, END, "[PAD0]", "[PAD1]", "[PAD2]"]
    assert all(vocabulary.piece(i) == b"" for i in controls)
    assert all(vocabulary.piece(i) for i in range(vocabulary.size) if i not in controls)
    assert [i for i in range(vocabulary.size) if vocabulary.ends_generation(i)] == [vocabulary.eos]
    assert (vocabulary.bos, vocabulary.eos) == (spelled.index(BEGIN), spelled.index(END))
    weights.close()


@over_native
@pytest.mark.parametrize("token", [-1, 289, 2**31, 2**70])
def test_a_token_id_that_is_none_is_an_error(backend: Native, token: int) -> None:
    vocabulary = backend.weights().vocabulary
    for ask in (vocabulary.piece, vocabulary.spelling, vocabulary.is_control, vocabulary.ends_generation):
        with pytest.raises(SettingError):
            ask(token)


@over_native
def test_text_that_is_no_unicode_is_a_prompt_error(backend: Native) -> None:
    with pytest.raises(PromptError, match="Unicode"):
        backend.weights().vocabulary.tokenize("half a \ud83d")


@over_native
def test_long_pieces_and_long_metadata_are_read_whole(backend: Native, tmp_path: Path) -> None:
    merges = ["a a", "aa aa", "aaaa aaaa"]
    merges += [f"{'a' * n} {'a' * n}" for n in (8, 16, 32, 64)]
    weights = backend.fresh(tmp_path, merges=merges, name="n" * 700)
    vocabulary = weights.vocabulary
    assert weights.metadata("general.name") == "n" * 700
    assert max(len(vocabulary.piece(i)) for i in range(vocabulary.size)) == 128
    assert [len(vocabulary.piece(t)) for t in vocabulary.tokenize("a" * 128)] == [128]
    weights.close()


# The library's log

LOADS_AND_FAILS = """
    import sys
    from pathlib import Path
    from outrider.backends.gguf.log import show_log
    from outrider.backends.gguf.model import Weights
    from outrider.backends.gguf.options import LoadOptions
    from outrider.core.data import Span
    _, path, library, log = sys.argv
    if log == "shown":
        show_log(True)
    options = LoadOptions(library=library)
    weights = Weights(Path(path), options)
    model = weights.open(64)
    model.decode([Span(0, (1, 2, 3), 0, 1)])
    try:
        Weights(Path(path + ".none"), options)
    except Exception as error:
        print(type(error).__name__, flush=True)
    if log == "closed":
        weights.close()
"""


@over_native
@pytest.mark.parametrize("log", ["hidden", "closed", "shown"])
def test_the_log_is_silent_unless_asked_for(backend: Native, tmp_path: Path, log: str) -> None:
    path = write_tiny(tmp_path / "own.gguf")
    code = textwrap.dedent(LOADS_AND_FAILS)
    child = subprocess.run(
        [sys.executable, "-c", code, str(path), str(backend.file.path), log],
        capture_output=True,
        text=True,
        check=False,
    )
    # Whatever is still open at the end of the program is no reason to crash, either.
    assert (child.returncode, child.stdout) == (0, "ModelFileError\n")
    assert ("llama_model_loader" in child.stderr) if log == "shown" else child.stderr == ""

"""Command lines made for llama.cpp: each option of its programs, for each command that takes them."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from cli_helpers import Call, refused
from outrider.backends.gguf.options import LoadOptions
from outrider.cli.llama_options import COMMANDS, table, translate
from outrider.cli.plans import load_options
from outrider.cli.serve_settings import ServeOptions
from outrider.cli.settings import ChatSettings, RunSettings
from outrider.core.errors import SettingError
from outrider.core.schema import Setting, settings_of

SETTINGS: Mapping[str, Mapping[str, Setting]] = {
    "run": settings_of(RunSettings),
    "chat": settings_of(ChatSettings),
    "serve": settings_of(ServeOptions),
}
FLAGS = {
    command: {"-h": False, "--help": False}
    | {name: setting.kind is not bool for setting in settings.values() for name in setting.names}
    for command, settings in SETTINGS.items()
}
"""The flags of each command, and whether they take a value."""


def in_command(command: str, *arguments: str) -> tuple[list[str], list[str]]:
    return translate(command, arguments, SETTINGS[command])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_the_table_is_answered(command: str) -> None:
    for name, (fate, note) in table().items():
        value = ["1"] if fate == "no_effect_with_value" or FLAGS["run"].get(note) else []
        try:
            found, notices = in_command(command, name, *value, "a prompt")
        except SettingError as error:
            expected = {
                "see": f"{name}: it is not supported. See {note}.",
                "not_supported": f"{name}: it is not supported. Leave it out.",
                "other_name": f"{name}: outrider {command} has no such option. ",
            }[fate]
            assert str(error).startswith(expected)
        else:
            if fate == "other_name":
                assert found == [note, *value, "a prompt"] and not notices
            else:
                assert found == ["a prompt"] and notices == [f"{name} has no effect here"]


def test_the_table_has_no_flag_of_ours_and_leads_to_some() -> None:
    ours = {name for flags in FLAGS.values() for name in flags}
    assert not ours & set(table())
    assert {note for fate, note in table().values() if fate == "other_name"} <= ours


@pytest.mark.parametrize("command", COMMANDS)
def test_what_the_command_has_itself_is_left_alone(command: str) -> None:
    flags = sorted(flag for flag in FLAGS[command] if flag.startswith("--"))
    assert in_command(command, *[f"{flag}=x" for flag in flags]) == ([f"{flag}=x" for flag in flags], [])


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("-no-cnv -p hi", "--raw -p hi"),
        ("-cnv", "-i"),
        ("-nr -hfr a/b", "--no-repack -hf a/b"),
        ("-p -no-cnv -n 3", "-p -no-cnv -n 3"),  # the value of an option is no option
        ("-n5 -t2", "-n 5 -t 2"),
        ("-s -1 --top-k -3", "-s -1 --top-k -3"),
        ("--no-warmup -- -cnv --lora", "-- -cnv --lora"),
        ("-", "-"),
        ("--seed=3", "--seed=3"),
        ("--system-prompt=be short", "-sys be short"),
    ],
)
def test_a_line_becomes_one_of_ours(arguments: str, found: str) -> None:
    words = arguments.split(" ") if "short" not in arguments else [arguments]
    expected = found.split(" ", 1) if "short" in found else found.split(" ")
    assert in_command("run", *words)[0] == expected


@pytest.mark.parametrize(
    ("arguments", "found", "unused"),
    [
        ("--spec-type none", "--policy plain", []),
        ("--spec-type draft-simple -md d.gguf", "--policy model -md d.gguf", []),
        ("--spec-type draft-mtp --spec-draft-n-max 3", "--policy model --spec-draft-n-max 3", []),
        ("--spec-type=ngram-mod,ngram-cache", "--policy lookup", []),
        ("--spec-type ngram-simple --spec-type draft-simple", "--policy auto", []),
        ("--spec-default", "--policy lookup", []),
        ("--spec-default --spec-type draft-eagle3 -n 5", "--policy auto -n 5", []),
        # Lengths of a draft model are kept to the letter, for whatever drafts.
        (
            "--spec-type draft-simple --spec-draft-p-min 0.75",
            "--policy fixed --no-lookup --spec-draft-p-min 0.75",
            ["--spec-draft-p-min"],
        ),
        (
            "--spec-type draft-simple,ngram-mod --spec-draft-n-min=2",
            "--policy fixed --spec-draft-n-min=2",
            ["--spec-draft-n-min=2"],
        ),
        ("-md d.gguf --draft-max 8 --draft-min 1", "-md d.gguf --draft-max 8 --draft-min 1", ["--draft-min"]),
        ("--policy fixed --draft-min 1", "--policy fixed --draft-min 1", []),
        ("--spec-type ngram-mod --draft-p-min 0.7 -n 5", "--policy lookup -n 5", ["--draft-p-min"]),
        ("--spec-type none --spec-draft-n-max 16", "--policy plain", ["--spec-draft-n-max"]),
        ("--spec-type ngram-mod --spec-ngram-mod-n-max 48", "--policy lookup --draft-max 48", []),
        ("--spec-draft-threads 2 -ctkd q8_0 -p --policy", "-td 2 -ctkd q8_0 -p --policy", []),
        ("--spec-type none -p hi -- --spec-type", "--policy plain -p hi -- --spec-type", []),
    ],
)
@pytest.mark.parametrize("command", ["run", "serve"])
def test_who_drafts_becomes_a_policy(command: str, arguments: str, found: str, unused: list[str]) -> None:
    if command == "serve" and (" -n " in arguments or " -p " in arguments):
        return
    words, notices = in_command(command, *arguments.split())
    assert (" ".join(words), [line.split()[0] for line in notices]) == (found, unused)
    has_model = not found.startswith(("--policy plain", "--policy lookup"))
    said = "leave it out, and Outrider chooses" if has_model else " has no effect here"
    assert all(said in line for line in notices)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--spec-type ngram", "--spec-type ngram: it is not supported. Choose from none, draft-simple, "),
        (
            "--spec-type draft-simple,draft-tree",
            "--spec-type draft-tree: it is not supported. Choose from none, ",
        ),
        ("--spec-type none --policy auto", "--spec-type: --policy says who drafts, too. Give one of them."),
        ("--spec-type", "--spec-type : it is not supported"),
    ],
)
def test_what_cannot_draft_is_said(arguments: str, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        in_command("run", *arguments.split())
    assert str(caught.value).startswith(message)


def test_a_draft_has_load_options_of_its_own() -> None:
    def options(**given: object) -> tuple[LoadOptions, LoadOptions]:
        settings = RunSettings.model_validate(given)
        return load_options(settings), load_options(settings, draft=True)

    target, draft = options(threads=4, threads_batch=8, cache_type_k="q8_0")
    assert draft == replace(target, heads=False)
    target, draft = options(threads=4, threads_batch=8, threads_draft=1)
    assert (target.threads, target.threads_batch, draft.threads, draft.threads_batch) == (4, 8, 1, 0)
    target, draft = options(threads_batch_draft=3, cache_type_v_draft="bf16", gpu_layers_draft=0)
    assert (draft.threads, draft.threads_batch, draft.cache_type_v, draft.gpu_layers) == (0, 3, "bf16", 0)
    assert (target.threads_batch, target.cache_type_v, target.gpu_layers) == (0, "f16", -1)


@pytest.mark.parametrize("word", ["-xyz", "-foo", "-iq", "-vq", "-tt"])
def test_no_word_is_read_as_several_short_options(word: str) -> None:
    with pytest.raises(SettingError, match=f"^{word}: outrider run has no such option"):
        in_command("run", word)


def test_the_program_says_what_it_refuses(outrider: Call) -> None:
    said = refused(outrider("run", "--warmup", "--mirostat", "2", "-p", "hi"))
    assert said == "--mirostat: it is not supported. See --min-p."

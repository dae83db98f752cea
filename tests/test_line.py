"""Command lines: the schema that flags are made of, and what llama.cpp's options mean here."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from outrider.backends.gguf.options import LoadOptions
from outrider.cli.help import COMMANDS, load
from outrider.cli.line import LLAMA_COMMANDS, Line, table
from outrider.cli.plans import load_options
from outrider.cli.settings import RunSettings
from outrider.core.errors import SettingError
from outrider.core.schema import Group, argument, setting, setting_error, settings_of

SETTINGS = {name: settings_of(load(spec.settings)) for name, spec in COMMANDS.items()}


class Sample(Group, panel="Samples"):
    """Some settings."""

    page: bool = setting(True, "Shown.")
    deep_red: bool = setting(False, "A colour.", "-d")
    size: int | None = setting(None, "A size.", "-s --size --length L")
    key: SecretStr | None = setting(None, "A key.")
    parts: list[int] = setting([], "Some parts.")


class Larger(Sample):
    """The same and one more."""

    name: str = argument(..., "A name.", "NAME")


def test_flags_panels_and_metavars_follow_from_names_and_types() -> None:
    found = settings_of(Larger)
    assert found["page"].names == ("--page", "--no-page")
    assert found["deep_red"].names == ("--deep-red", "-d") and found["deep_red"].metavar is None
    assert found["size"].names == ("-s", "--size", "--length") and found["size"].flag == "--size"
    assert (found["size"].metavar, found["size"].help) == ("L", "A size.")
    assert (found["key"].kind, found["parts"].kind, found["parts"].metavar) == (str, int, "N")
    assert found["parts"].is_list and found["parts"].default is None
    assert found["name"].is_required and found["name"].names == ()
    assert {made.panel for made in found.values()} == {"Samples", "Output"}


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("a -s3 --no-page -d", {"name": "a", "size": "3", "page": False, "deep_red": True}),
        ("--length=-3 --parts 1 --parts=2 -- -d", {"name": "-d", "size": "-3", "parts": ["1", "2"]}),
        ("-s -d --page -", {"name": "-", "size": "-d", "page": True}),
    ],
)
def test_a_line_gives_values(line: str, values: dict[str, Any]) -> None:
    assert Line("sample", line.split(), settings_of(Larger)).values() == values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": "x", "name": "a"}, "--size: x cannot be used: it has to be a whole number"),
        ({"key": ["secret"], "name": "a"}, "key: it has to be text"),
        ({}, "name: it is missing. A name"),
    ],
)
def test_an_error_names_the_place_and_never_a_secret(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Larger.model_validate(values)
    said = str(setting_error(caught.value, Larger, values, {"size": "--size"}))
    assert said.startswith(message) and "secret" not in said and said.endswith(".")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_two_settings_of_a_command_share_a_flag(command: str) -> None:
    found = [name for made in SETTINGS[command].values() for name in made.names]
    assert len(found) == len(set(found))


# llama.cpp's options


def in_command(command: str, *words: str) -> tuple[list[str], list[str]]:
    line = Line(command, words, SETTINGS[command])
    return [part for option in line.found for part in option if part], line.notices


@pytest.mark.parametrize("command", LLAMA_COMMANDS)
def test_every_option_of_the_table_is_answered(command: str) -> None:
    valued = {name for made in SETTINGS["run"].values() if made.kind is not bool for name in made.names}
    for name, (fate, note) in table().items():
        value = ["1"] if fate == "no_effect_with_value" or note in valued else []
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
    ours = {flag for name in LLAMA_COMMANDS for made in SETTINGS[name].values() for flag in made.names}
    assert not ours & set(table())
    assert {note for fate, note in table().values() if fate == "other_name"} <= ours


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("-no-cnv -p hi", "--raw -p hi"),
        ("-nr -hfr a/b", "--no-repack -hf a/b"),
        ("-p -no-cnv -n 3", "-p -no-cnv -n 3"),  # the value of an option is no option
        ("-n5 -t2", "-n 5 -t 2"),
        ("-s -1 --top-k -3", "-s -1 --top-k -3"),
        ("--no-warmup -- -cnv --lora", "-cnv --lora"),
        ("--system-prompt=short", "-sys short"),
    ],
)
def test_a_line_becomes_one_of_ours(arguments: str, found: str) -> None:
    assert in_command("run", *arguments.split())[0] == found.split()


@pytest.mark.parametrize(
    ("arguments", "found", "unused"),
    [
        ("--spec-type none", "--policy plain", ""),
        ("--spec-type draft-simple -md d.gguf", "-md d.gguf --policy model", ""),
        ("--spec-type draft-mtp --spec-draft-n-max 3", "--spec-draft-n-max 3 --policy model", ""),
        ("--spec-type=ngram-mod,ngram-cache", "--policy lookup", ""),
        ("--spec-type ngram-simple --spec-type draft-simple", "--policy auto", ""),
        ("--spec-default", "--policy lookup", ""),
        ("--spec-default --spec-type draft-eagle3 -c 5", "-c 5 --policy auto", ""),
        # Lengths of a draft model are kept to the letter, for whatever drafts: they imply fixed ones.
        ("--spec-type draft-simple --draft-p-min 0.75", "--draft-p-min 0.75 --no-lookup", ""),
        ("--spec-type draft-simple,ngram-mod --draft-p-min=0.2", "--draft-p-min 0.2", ""),
        ("--draft-max 8 --draft-min 1", "--draft-max 8", "--draft-min has no effect here"),
        ("--spec-type ngram-mod --draft-p-min 0.7 -c 5", "-c 5 --policy lookup", "--draft-p-min has no "),
        (
            "--spec-type none --spec-draft-n-max 16",
            "--policy plain",
            "--spec-draft-n-max has no effect here: --spec-type names no draft model",
        ),
        ("--spec-type ngram-mod --spec-ngram-mod-n-max 48", "--draft-max 48 --policy lookup", ""),
        ("--spec-draft-threads 2 -ctkd q8_0", "-td 2 -ctkd q8_0", ""),
        ("--spec-type none -m --policy -- --spec-type", "-m --policy --spec-type --policy plain", ""),
    ],
)
@pytest.mark.parametrize("command", ["run", "serve"])
def test_who_drafts_becomes_a_policy(command: str, arguments: str, found: str, unused: str) -> None:
    words, notices = in_command(command, *arguments.split())
    assert " ".join(words) == found
    assert len(notices) == bool(unused) and "".join(notices).startswith(unused)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--spec-type ngram", "--spec-type ngram: it is not supported. Choose from none, draft-simple, "),
        ("--spec-type draft-simple,draft-tree", "--spec-type draft-tree: it is not supported. Choose from "),
        ("--spec-type none --policy auto", "--spec-type: --policy says who drafts, too. Give one of them."),
        ("--spec-type", "--spec-type : it is not supported"),
        *((word, f"{word}: outrider run has no such option") for word in ("-xyz", "-foo", "-qv", "-tt")),
    ],
)
def test_what_is_not_an_option_is_said(arguments: str, message: str) -> None:
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

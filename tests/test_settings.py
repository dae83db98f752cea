"""The schema of settings: what flags it makes, and that commands agree on those that they share."""

import pytest
from pydantic import SecretStr, ValidationError

from cli_helpers import Call
from outrider.cli.help import COMMANDS, load
from outrider.core.schema import Group, Setting, argument, setting, setting_error, settings_of, with_default
from outrider.core.settings import PairSettings


class Sample(Group, panel="Samples"):
    """Some settings."""

    page: bool = setting(True, "Shown.")
    deep_red: bool = setting(False, "A colour.", "-d")
    size: int | None = setting(None, "A size.", "-s --size --length L")
    key: SecretStr | None = setting(None, "A key.")
    parts: list[int] = setting([], "Some parts.")


class Larger(Sample):
    """The same with another default, and one more."""

    size: int | None = with_default(Sample, "size", 3)
    name: str = argument(..., "A name.")


def of_command(name: str) -> dict[str, Setting]:
    return settings_of(load(COMMANDS[name].settings))


def names_of(made: Setting) -> list[str]:
    return [part for flag in made.flags for part in flag.split("/")]


def test_flags_panels_and_metavars_follow_from_names_and_types() -> None:
    found = settings_of(Larger)
    assert found["page"].flags == ("--page/--no-page",)
    assert found["deep_red"].flags == ("--deep-red", "-d") and found["deep_red"].metavar is None
    assert found["size"].flags == ("-s", "--size", "--length") and found["size"].flag == "--size"
    assert (found["size"].default, found["size"].metavar, found["size"].help) == (3, "L", "A size.")
    assert (found["key"].kind, found["parts"].kind, found["parts"].metavar) == (str, int, "N")
    assert found["parts"].is_list and found["parts"].default is None
    assert found["name"].is_required and found["name"].flags == ()
    assert {made.panel for made in found.values()} == {"Samples", "Output"}


def test_an_error_names_the_place_and_never_a_secret() -> None:
    for values, message in (
        ({"size": "x", "name": "a"}, "--size: x cannot be used: it has to be a whole number"),
        ({"key": ["secret"], "name": "a"}, "key: it has to be text"),
    ):
        with pytest.raises(ValidationError) as caught:
            Larger.model_validate(values)
        said = str(setting_error(caught.value, Larger, values, {"size": "--size"}))
        assert said.startswith(message) and "secret" not in said and said.endswith(".")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_two_settings_of_a_command_share_a_flag(command: str) -> None:
    found = [name for made in of_command(command).values() for name in names_of(made)]
    assert len(found) == len(set(found))


@pytest.mark.parametrize("command", ["run", "chat", "verify", "serve"])
def test_commands_that_load_a_pair_share_its_flags(command: str) -> None:
    found = of_command(command)
    for name, made in settings_of(PairSettings).items():
        assert set(made.flags) == set(found[name].flags) and made.kind is found[name].kind, name


def test_a_misspelled_command_is_answered_with_a_similar_one(outrider: Call) -> None:
    outcome = outrider("serv")
    assert outcome.status == 2 and "'serve'" in outcome.err

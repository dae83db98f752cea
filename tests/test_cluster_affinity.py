"""Which requests go to one replica, and the metrics of all of them on one page."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.core.errors import SettingError
from outrider.fleet.ray.affinity import MAX_CHARACTERS, routing_key
from outrider.fleet.ray.merging import merged
from outrider.server.settings import ServeSettings

HELLO = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]


def key(body: Any, caller: str = "", **headers: str) -> str:
    return routing_key(headers, json.dumps(body).encode(), caller)


def test_a_conversation_keeps_its_key_as_it_goes_on() -> None:
    later = [*HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "More"}]
    assert key({"messages": HELLO}) == key({"messages": later, "temperature": 0.3})
    assert key({"messages": HELLO}) != key({"messages": [HELLO[0], {"role": "user", "content": "Bye"}]})
    assert key({"system": "Be short.", "messages": HELLO[1:]}) != key({"messages": HELLO[1:]})


def test_one_long_beginning_is_one_key_whatever_follows() -> None:
    long = {"role": "system", "content": "x" * MAX_CHARACTERS}
    asked = [[long, {"role": "user", "content": question}] for question in ("one", "two")]
    assert key({"messages": asked[0]}) == key({"messages": asked[1]})
    assert key({"prompt": "y" * MAX_CHARACTERS + "1"}) == key({"prompt": "y" * MAX_CHARACTERS + "2"})
    assert key({"prompt": "short 1"}) != key({"prompt": "short 2"})


def test_keys_of_callers_are_kept_apart_and_a_named_session_wins() -> None:
    assert key({"messages": HELLO}, "ada") != key({"messages": HELLO}, "bob")
    sessions = {"x-session-id": "7"}
    assert key({"prompt": "a"}, **sessions) == key({"prompt": "b"}, **sessions)
    assert key({"prompt": "a"}, "ada", **sessions) != key({"prompt": "a"}, "bob", **sessions)


@pytest.mark.parametrize("body", [b"", b"{", b"[1, 2]", b'"text"', b"\xff\xfe", b'{"messages": 3}', b"null"])
def test_any_body_has_a_key(body: bytes) -> None:
    assert routing_key({}, body) == routing_key({}, body)


def test_metrics_of_replicas_are_one_text_with_a_label() -> None:
    text = (
        "# HELP a_total Of something\n# TYPE a_total counter\na_total 3.0\n"
        '# HELP b Of others {x}\n# TYPE b gauge\nb{key="a b"} 1.0\nb{key="c"} 2.0\n'
    )
    found = {f.name: f for f in text_string_to_metric_families(merged({"r1": text, "r2": text}))}
    assert {f.name: f.documentation for f in found.values()} == {"a": "Of something", "b": "Of others {x}"}
    assert [s.labels["replica"] for s in found["a"].samples] == ["r1", "r2"]
    labels = [(s.labels["replica"], s.labels["key"], s.value) for s in found["b"].samples]
    assert labels == [("r1", "a b", 1), ("r1", "c", 2), ("r2", "a b", 1), ("r2", "c", 2)]
    assert merged({}) == ""


@pytest.mark.parametrize(("text", "found"), [("2", (2, 2)), ("1:4", (1, 4))])
def test_numbers_of_replicas(text: str, found: tuple[int, int]) -> None:
    settings = ServeSettings(ray="local", replicas=text)
    settings.check()
    assert settings.replica_range == found


@pytest.mark.parametrize("text", ["0", "3:2", "x", "1:", "-1:2", "1:2:3"])
def test_no_number_of_replicas_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="replicas"):
        ServeSettings(ray="local", replicas=text).check()


def test_replicas_need_a_cluster() -> None:
    with pytest.raises(SettingError, match="no cluster"):
        ServeSettings(replicas="2").check()

"""The OpenAPI document held against the server: whatever fits it, and whatever does not."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, status_code_conformance

from examples import examples
from outrider.server.settings import ServeSettings
from serving import Serving, serving

MOST = 60
"""cases of each kind"""

CHECKS: Any = [not_a_server_error, status_code_conformance, negative_data_rejection]


@pytest.fixture(scope="module")
def running() -> Iterator[Serving]:
    with serving(settings=ServeSettings(default_max_tokens=8, max_tokens=64)) as served:
        yield served


@pytest.fixture(scope="module")
def document(running: Serving) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", running.app)


READS = (
    *("/v1/models", "/v1/models/{model}", "/health", "/outrider/status"),
    *("/props", "/api/tags", "/api/ps", "/api/version"),
)
WRITES = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"),
    *("/completion", "/infill", "/apply-template", "/api/chat", "/api/generate", "/api/show"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *(("GET", path, GenerationMode.POSITIVE) for path in READS),
        *(("POST", path, mode) for path in WRITES for mode in GenerationMode),
    ],
)
def test_the_document_is_true(
    running: Serving, document: Any, method: str, path: str, mode: GenerationMode
) -> None:
    @settings(max_examples=examples(MOST), suppress_health_check=list(HealthCheck), derandomize=True)
    @given(document[path][method].as_strategy(generation_mode=mode))
    def hold(case: Any) -> None:
        response = case.call()
        case.validate_response(response, checks=CHECKS)

    hold()
    assert running.idle()

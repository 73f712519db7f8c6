"""The proxy of the real servers' tests, before a server of sane answers: each wrong is seen."""

from __future__ import annotations

import json
import random

import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from sm75.health import check, client
from sm75.health.client import Server
from tests.realserver.cases import CASES, Case, in_manner
from tests.realserver.proxy import between
from tests.unit.test_health import completion, sane, stream


@pytest.fixture
def url(httpserver: HTTPServer) -> str:
    r = random.Random(11)

    def handle(request: Request) -> Response:
        asked = json.loads(request.data)
        said = sane(asked["messages"][-1]["content"], r)
        if asked["stream"]:
            return stream(said)
        return Response(json.dumps(completion(said)), content_type="application/json")

    httpserver.expect_request("/v1/models").respond_with_json({"data": [{"id": "tiny"}]})
    httpserver.expect_request(client.CHAT, method="POST").respond_with_handler(handle)
    return httpserver.url_for("").rstrip("/")


@pytest.mark.parametrize(
    "case", [c for c in CASES if not c.name.startswith("slow")], ids=lambda case: case.name
)
def test_each_wrong_is_seen(url: str, case: Case) -> None:
    with between(url, case.wrong()) as front:
        health = check.check(Server(front, timeout=60))
    assert health.exit_code == case.code, health.verdict
    assert case.says in health.verdict


def test_a_manner_is_asked_for_by_a_system_message(url: str, httpserver: HTTPServer) -> None:
    with between(url, in_manner(3)) as front:
        assert check.check(Server(front, timeout=60)).well
    asked = [json.loads(r.data)["messages"] for r, _ in httpserver.log if r.method == "POST"]
    assert [len(messages) for messages in asked] == [1, 2, 2]
    assert asked[1][0] == {"role": "system", "content": "Answer in manner D."}

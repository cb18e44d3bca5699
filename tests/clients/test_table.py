"""The table of clients is complete, and is what the drivers have."""

import ast
import inspect
import re

import pytest

from tests.clients import judge
from tests.clients.drivers import FUNCTIONS, Driver
from tests.clients.forms import FORMS, TEXTS
from tests.clients.table import CLIENTS, FEATURES, HERE, PAGES, Client, Lack, versions

METHODS = {name for name, _ in inspect.getmembers(Driver, inspect.isfunction) if name[0] != "_"}
METHODS -= {"__init__"}


def test_every_package_is_pinned() -> None:
    pinned = versions()
    assert all((client.kind, client.package) in pinned for client in (*CLIENTS, *PAGES))
    lock = (HERE / "npm" / "package-lock.json").read_text()
    assert "resolved" not in lock  # no registry's address


@pytest.mark.parametrize(
    "client",
    [client for client in CLIENTS if client.kind == "python"],
    ids=lambda client: client.name,
)
def test_a_driver_has_a_function_for_each_feature_that_its_client_has(client: Client) -> None:
    tree = ast.parse((HERE / "drivers" / f"{client.driver}.py").read_text())
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    functions = {item.name for item in tree.body if isinstance(item, kinds)}
    lacking = {name for name, lack in client.lacks.items() if not lack.error}
    tried = FEATURES.keys() - lacking
    required = {"structured" if name in FORMS else FUNCTIONS.get(name, name) for name in tried}
    assert required <= functions
    assert required <= METHODS


def test_a_lack_names_a_feature_and_its_reason() -> None:
    for client in CLIENTS:
        assert client.lacks.keys() <= FEATURES.keys()
        assert all(lack.why for lack in client.lacks.values())


def test_npm_has_the_drivers() -> None:
    text = (HERE / "npm" / "drivers.mjs").read_text()
    (named,) = re.findall(r"^const drivers = \{$(.*?)^\};$", text, re.M | re.S)
    found = set(re.findall(r"^  (\w+):", named, re.M))
    assert found == {client.driver for client in CLIENTS if client.kind == "npm"}


ERROR = {"names": ["p.Specific", "p.General"], "message": "too much: 9 tokens"}
TOLD = {
    "chat": ("It is Paris.", "It is Lyon."),
    "stream": (["It is", " Paris."], ["It is Paris."]),
    "enums": ({"colour": "red", "size": "small"}, {"colour": "pink", "size": "small"}),
    "tools": (
        {"calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}], "answer": "a"},
        {"calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}] * 2, "answer": "a"},
    ),
    "embeddings": ([[0.6, 0.8]] * len(TEXTS), [[0.6, 0.9]] * len(TEXTS)),
}


@pytest.mark.parametrize("feature", TOLD)
def test_right_and_wrong_outcomes_are_told_apart(feature: str) -> None:
    client = Client("a", "python", "a", "chat")
    right, wrong = TOLD[feature]
    assert judge.problem(client, feature, {"result": right}) is None
    assert judge.problem(client, feature, {"result": wrong})
    assert judge.problem(client, feature, {"error": ERROR}) == "p.Specific: too much: 9 tokens"


def test_an_error_counts_where_it_is_the_right_one() -> None:
    def refused(too_long: str, says: str) -> str | None:
        client = Client("a", "python", "a", "chat", too_long=too_long, says=says)
        return judge.problem(client, "too_long", {"error": ERROR})

    assert refused("p.General", "9 tokens") is None
    assert refused("p.Other", "9 tokens")
    assert refused("p.General", "8 tokens")
    lacking = Client("a", "python", "a", "chat", lacks={"chat": Lack("never", "9 tokens")})
    assert judge.problem(lacking, "chat", {"error": ERROR}) is None
    assert "it works" in str(judge.problem(lacking, "chat", {"result": "Paris"}))
    assert judge.problem(lacking, "chat", {"error": ERROR | {"message": "other"}})

"""Names that the hub does not allow are refused before anything is asked."""

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from specops.config import Settings
from specops.models.hub import HubModel
from specops.models.prepare import ModelError, choose


@pytest.mark.parametrize(
    "name",
    [
        *("org/name.git", "org/my--model", "my--org/model", "org/a..b", "org/name-", "org/name."),
        *("org-/name", f"org/{'x' * 97}", f"{'x' * 97}/name"),
    ],
)
def test_it_is_refused_with_the_rules(name: str) -> None:
    with pytest.raises(HFValidationError):
        validate_repo_id(name)
    for text in (name, f"{name}@main", f"{name}:folder"):
        with pytest.raises(
            ModelError, match="neither a local path nor a name on the hub: such a name has no"
        ):
            HubModel.parse(text)
    with pytest.raises(ModelError, match="neither a local path nor a name on the hub"):
        choose(Settings(target=name))


def test_a_url_is_refused_with_how_models_are_named() -> None:
    with pytest.raises(ModelError, match="is a URL: a model on the hub is named org/name"):
        choose(Settings(target="https://hub.example/org/name"))


@pytest.mark.parametrize("name", ["org/name.gitx", "org/a-b.c_d", f"org/{'x' * 96}", "o/n_"])
def test_all_others_are_taken(name: str) -> None:
    validate_repo_id(name)
    assert HubModel.parse(name) == HubModel(name)
    assert HubModel.parse(f"{name}@a--b") == HubModel(name, "a--b")

"""A plugin of pytest: vLLM's tests over HTTP start Spec-Ops by their own `RemoteOpenAIServer`.

`vllm`, `torch` and what else they import are mocks: a test that needs more of them than a client
does is not claimed. One service with the default model serves all tests, and a second one those
that set a key. A request that sets no temperature gets the likeliest tokens, so that every run has
the same texts.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from unittest.mock import MagicMock

import anthropic
import openai
import product
import requests

MOCKED = ("fastapi", "pybase64", "vllm", "torch", "openai_harmony", "transformers", "PIL")
VOCABULARY, SPECIAL = 49152, 17  # SmolLM2's tokens; the first ones are special
SETTINGS = {
    "SPECOPS_MODEL": "smollm2",
    "SPECOPS_QUEUE_SIZE": "1000",  # as long as vLLM's
    "SPECOPS_SAMPLING": "temperature=0",
}


class Mocked(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=f"{self.__name__}.{name}"))
        return getattr(self, name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in MOCKED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Mocked(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
import torch  # noqa: E402
import vllm.config  # noqa: E402
import vllm.tokenizers  # noqa: E402

_addresses = {}


def address(key=""):
    """Return the address of the service that asks for this key."""
    if key not in _addresses:
        port, _ = product.start(SETTINGS | ({"SPECOPS_API_KEYS": key} if key else {}))
        _addresses[key] = f"http://127.0.0.1:{port}"
    return _addresses[key]


class Tokenizer:
    """The served model's, over HTTP."""

    vocab_size = VOCABULARY

    def encode(self, text, add_special_tokens=False, **_):
        body = {"content": text, "add_special": add_special_tokens}
        return requests.post(address() + "/tokenize", json=body, timeout=60).json()["tokens"]

    def decode(self, ids, skip_special_tokens=False, **_):
        body = {"tokens": [token for token in ids if token >= SPECIAL or not skip_special_tokens]}
        return requests.post(address() + "/detokenize", json=body, timeout=60).json()["content"]


class RemoteOpenAIServer:
    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model=None, args=(), *_, **__):
        args = list(args or ())
        self.key = args[args.index("--api-key") + 1] if "--api-key" in args else ""
        self.url_root = address(self.key)
        self.host, self.port = "127.0.0.1", int(self.url_root.rpartition(":")[2])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def url_for(self, *parts):
        return "/".join((self.url_root, *parts))

    def _options(self, options, base):
        key = self.key or "none"
        return {"base_url": base, "api_key": key, "max_retries": 0, "timeout": 200, **options}

    def get_client(self, **options):
        return openai.OpenAI(**self._options(options, self.url_root + "/v1"))

    def get_async_client(self, **options):
        return openai.AsyncOpenAI(**self._options(options, self.url_root + "/v1"))

    def get_async_client_anthropic(self, **options):
        return anthropic.AsyncAnthropic(**self._options(options, self.url_root))


torch.long = "long"
torch.iinfo = lambda kind: types.SimpleNamespace(min=-(2**63), max=2**63 - 1)
vllm.config.ModelConfig = type(
    "ModelConfig",
    (),
    {"__init__": lambda self, *_, **__: None, "get_vocab_size": lambda self: VOCABULARY},
)
vllm.tokenizers.get_tokenizer = lambda *_, **__: Tokenizer()
_utils = Mocked("tests.utils")
_utils.RemoteOpenAIServer = RemoteOpenAIServer
sys.modules["tests.utils"] = _utils

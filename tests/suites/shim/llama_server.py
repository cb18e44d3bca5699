"""A plugin of pytest: llama.cpp's server tests start Spec-Ops by their own `ServerProcess`.

Options of llama-server become settings of Spec-Ops, as far as there are any. The suite's small
model, which only the hub has, is replaced by one of the same shape and numbers of tokens
(`tests/suites/stories.py`); in place of a large model stands the product's SmolLM2 with that
model's chat template. Expected words are not compared, because the models are others.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import product

sys.modules.setdefault("wget", types.ModuleType("wget"))  # nothing is downloaded
import utils  # noqa: E402 - the suite's own, which its tests import all of
from utils import ServerProcess  # noqa: E402

TEMPLATES = Path(utils.__file__).parents[3] / "models" / "templates"
# Tests that look at what earlier requests left behind: each has a server of its own.
ALONE = ("test_completion.py", "test_ctx_shift", "test_metrics", "test_kv_keep", "test_speculative",
         "cached_tokens", "multiple_choices")  # fmt: skip
SMALL = ("stories", "tinygemma3", "ggml-org/models")  # models that the small one stands for
# Templates that llama-server has built in.
BUILT_IN = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}",
    "llama3": "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' +"
    " m.content|trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "command-r": "{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' + {'system': "
    "'<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}[m.role] + "
    "m.content|trim + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
}
# Whose template file stands for that of a model of the hub.
OF_MODEL = {
    "Meta-Llama-3.1-8B": "meta-llama-Llama-3.1-8B-Instruct",
    "gemma-2-2b-it": "google-gemma-2-2b-it",
    "Phi-3.5-mini": "microsoft-Phi-3.5-mini-instruct",
    "Qwen2.5-": "Qwen-Qwen2.5-7B-Instruct",
    "Hermes-2-Pro": "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "Hermes-3": "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Mistral-Nemo": "mistralai-Mistral-Nemo-Instruct-2407",
    "functionary-small-v3.2": "meetkai-functionary-medium-v3.2",
    "Llama-3.2-": "meta-llama-Llama-3.2-3B-Instruct",
    "command-r7b": "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
}


def template(server):
    """Return the chat template that a test asks for."""
    if server.chat_template_file:
        return (TEMPLATES / Path(server.chat_template_file).name).read_text(encoding="utf-8")
    name = server.chat_template or "chatml"
    file = next((OF_MODEL[part] for part in OF_MODEL if part in (server.model_hf_repo or "")), None)
    if file and not server.chat_template:
        return (TEMPLATES / f"{file}.jinja").read_text(encoding="utf-8")
    return BUILT_IN.get(name, name)


def small_model(server, context):
    """Return the folder of the small model with this template, and room for `context` tokens."""
    name = (server.model_alias or "tinyllama-2").split(",")[0].replace("/", "-")
    key = hashlib.sha256(f"{name}\0{template(server)}\0{context}".encode()).hexdigest()[:10]
    folder = product.MODELS / "stories.gguf" / key / name
    if not (folder / "chat_template.jinja").exists():
        shutil.copytree(product.MODELS / "stories", folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        # llama-server goes beyond the context that a model was trained for.
        config["max_position_embeddings"] = max(context, config["max_position_embeddings"])
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(template(server), encoding="utf-8")
    return folder


def chat_model(server):
    """Return the file of SmolLM2 with this template."""
    key = hashlib.sha256(template(server).encode()).hexdigest()[:10]
    file = product.MODELS / "smollm2" / f"smollm2-{key}.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        script = "from specops.presets import chat_model; print(chat_model())"
        found = subprocess.run([product.PYTHON, "-c", script], capture_output=True, check=True)
        command = [product.PYTHON, "-m", "gguf.scripts.gguf_new_metadata", "--chat-template"]
        command += [template(server), found.stdout.decode().strip(), str(file)]
        subprocess.run(command, capture_output=True, check=True)
    return file


def settings(server):
    """Return the SPECOPS_ variables for llama-server's options."""
    repository, slots = server.model_hf_repo or "", server.n_slots or 4
    context = (server.n_ctx or 0) // (1 if server.kv_unified else slots)
    env = {"SPECOPS_SLOTS": slots, "SPECOPS_SAMPLING": f"temperature={server.temperature}"}
    if "infill" in repository:
        env["SPECOPS_TARGET"] = product.MODELS / "stories-infill"
    elif not repository or server.model_hf_file or any(name in repository for name in SMALL):
        env |= {"SPECOPS_TARGET": small_model(server, context), "SPECOPS_SYSTEM": "none"}
    else:
        env["SPECOPS_TARGET"] = chat_model(server)
    if env["SPECOPS_TARGET"].is_dir():
        env["SPECOPS_QUANT"] = "int8-32"
    if server.model_draft:
        env |= {"SPECOPS_DRAFT": product.MODELS / "stories", "SPECOPS_DRAFT_QUANT": "int8-32"}
        env["SPECOPS_DRAFTER"] = "draft"
    if server.n_ctx:
        env["SPECOPS_CONTEXT"] = context
        if server.kv_unified:
            env["SPECOPS_KV_TOKENS"] = server.n_ctx
    if server.n_predict:  # there a default, here a limit: some tests ask for 128 where it is 64
        env["SPECOPS_MAX_NEW_TOKENS"] = (
            context if server.n_predict < 0 else max(server.n_predict, 128)
        )
    origins = server.cors_origins or ("" if server.server_tools else "*")
    for name, value in (
        ("MAX_BATCHED_TOKENS", server.n_batch),
        ("THREADS", server.n_threads),
        ("API_KEYS", server.api_key),
        ("ALLOWED_ORIGINS", "" if origins == "localhost" else origins),
        ("MAX_K_DRAFT", server.spec_draft_n_max),
    ):
        if value:
            env[f"SPECOPS_{name}"] = value
    return {name: str(value) for name, value in env.items()}


_running = []  # at most one: its settings, port and process


def start(self, timeout_seconds=None):
    wanted, test = settings(self), os.environ.get("PYTEST_CURRENT_TEST", "")
    shared = not (self.log_path or any(name in test for name in ALONE))
    utils.server_instances.add(self)
    if not (shared and _running and _running[0][0] == wanted and _running[0][2].poll() is None):
        while _running:
            product.end(_running.pop()[2])
        _running.append((wanted if shared else None, *product.start(wanted, self.log_path)))
    _, self.server_port, self.process = _running[0]
    self.ready = True


def stop(self):
    utils.server_instances.discard(self)
    if _running and _running[0][0] is None:
        product.end(_running.pop()[2])
    self.process = None


_request = ServerProcess.make_request


def make_request(self, *arguments, **more):
    answer = _request(self, *arguments, **more)
    answer.headers = utils.requests.structures.CaseInsensitiveDict(answer.headers)  # as HTTP has it
    return answer


ServerProcess.start, ServerProcess.stop, ServerProcess.make_request = start, stop, make_request
utils.ServerPreset.load_all = staticmethod(lambda: None)
utils.match_regex = lambda regex, text: True
utils.download_file = lambda url, path=None: str(product.MODELS / "stories")

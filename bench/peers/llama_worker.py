"""llama.cpp as a side of the comparison, through its C interface, with no Python between passes.

It runs in the peers' environment. All settings but the number of threads, the batch and what `q8`
asks for are defaults: repacked weights, float16 keys and values, flash attention if llama.cpp
chooses it, as it does on CPUs. These are its fastest settings. CPU milliseconds of one thread on an
AMD EPYC with AVX512-VNNI, version 0.3.36, for 1 token, 8 tokens, 8 rows of 1 token, and a prompt of
192:

| file | defaults | no flash attention | no repacking |
|---|---|---|---|
| Q4_0 | 29, 125, 128, 1416 | 27, 114, 123, 1574 | 37, 248, 247, 3972 |
| Q4_K_M | 30, 195, 197, 1900 | 30, 192, 201, 2105 | 31, 300, 309, 2541 |
"""

from collections.abc import Sequence

import llama_cpp
import numpy as np
import numpy.typing as npt

from bench.peers.protocol import Pass, Side, prompt
from bench.tools.worker import serve

_DECODED = 0


class LlamaSide(Side):
    """A context with a sequence per row or request.

    The prompts of concurrent requests form one batch. Then every pass has one token of each
    request. Requests that arrive together need no scheduling, so this is llama.cpp's minimum time.
    """

    def load(self, model: str, *, threads: int, rows: int, capacity: int, q8: bool = False) -> str:
        """See `Side`; `q8`: flash attention, and keys and values in q8_0."""
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            model.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = rows * capacity
        options.n_seq_max = rows
        options.n_threads = options.n_threads_batch = threads
        if q8:
            options.type_k = options.type_v = llama_cpp.GGML_TYPE_Q8_0
            options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._rows = rows
        self._batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)
        self._lengths = [0] * rows
        return f"llama-cpp-python {llama_cpp.__version__}"

    def _hold(self, rows: int, length: int) -> None:
        kept = min(self._lengths[0], length)
        llama_cpp.llama_memory_seq_rm(self._memory, 0, kept, -1)
        self._lengths[0] = kept
        if kept < length:
            self._prepare([(0, prompt(length, self._vocab)[kept:])], every=False)()
        for row in range(1, rows):
            llama_cpp.llama_memory_seq_rm(self._memory, row, -1, -1)
            llama_cpp.llama_memory_seq_cp(self._memory, 0, row, -1, -1)
            self._lengths[row] = length

    def _step(self, rows: int, tokens: int) -> Pass:
        ids = prompt(tokens, self._vocab)
        return self._prepare([(row, ids) for row in range(rows)], every=True)

    def _prefill(self, prompt: Sequence[int]) -> Pass:
        return self._prepare([(0, prompt)], every=False)

    def _score(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        self._hold(1, 0)
        self._prepare([(0, tokens)], every=True)()
        rows = (llama_cpp.llama_get_logits_ith(self._context, row) for row in range(len(tokens)))
        return np.stack([np.ctypeslib.as_array(row, (self._vocab,)).copy() for row in rows])

    def _logits(self) -> list[float]:
        row = llama_cpp.llama_get_logits_ith(self._context, -1)
        return [row[index] for index in range(self._vocab)]

    def _complete(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(self._memory, False)
        self._lengths = [0] * self._rows
        self._prepare(list(enumerate(prompts)), every=False)()
        found: list[list[int]] = [[] for _ in prompts]
        ends = np.cumsum([len(prompt) for prompt in prompts]) - 1
        while True:
            for answer, end in zip(found, ends, strict=True):
                answer.append(self._likeliest(int(end)))
            if len(found[0]) == output:
                return found
            self._prepare([(row, answer[-1:]) for row, answer in enumerate(found)], every=True)()
            ends = np.arange(len(prompts))

    def _likeliest(self, index: int) -> int:
        """The most likely token after one of the tokens of the last batch."""
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())

    def _prepare(self, parts: Sequence[tuple[int, Sequence[int]]], *, every: bool) -> Pass:
        """Fill the batch; logits are for every token, or for the last token of each row."""
        batch, count = self._batch, 0
        for row, ids in parts:
            for offset, token in enumerate(ids):
                batch.token[count] = token
                batch.pos[count] = self._lengths[row] + offset
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = row
                batch.logits[count] = every or offset == len(ids) - 1
                count += 1
            self._lengths[row] += len(ids)
        batch.n_tokens = count

        def run() -> None:
            status = llama_cpp.llama_decode(self._context, batch)
            if status != _DECODED:
                raise RuntimeError(f"llama_decode failed with {status}")
            llama_cpp.llama_synchronize(self._context)

        return run


if __name__ == "__main__":
    serve(LlamaSide())

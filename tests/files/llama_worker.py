"""llama.cpp's tokenizer for one GGUF: texts come as lines of JSON, tokens go as such.

It runs in an environment of its own, with llama.cpp's library: `llama_worker.py FILE [special]`.
The first line that it writes says which tokens begin and end texts.
"""

import ctypes
import json
import sys

import llama_cpp


def main(file: str, special: bool) -> None:
    """Answer each line with the tokens of its text."""
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(file.encode(), options)
    if not model:
        sys.exit(f"{file} cannot be loaded")
    vocab = llama_cpp.llama_model_get_vocab(model)
    size = llama_cpp.llama_vocab_n_tokens(vocab)
    roles = {
        "bos": llama_cpp.llama_vocab_bos(vocab),
        "eos": llama_cpp.llama_vocab_eos(vocab),
        "adds_bos": llama_cpp.llama_vocab_get_add_bos(vocab),
        "adds_eos": llama_cpp.llama_vocab_get_add_eos(vocab),
        "ends": [token for token in range(size) if llama_cpp.llama_vocab_is_eog(vocab, token)],
    }
    print(json.dumps(roles), flush=True)
    for line in sys.stdin:
        text = json.loads(line).encode()
        room = len(text) + 8
        found = (ctypes.c_int32 * room)()
        count = llama_cpp.llama_tokenize(vocab, text, len(text), found, room, special, special)
        if count < 0:
            sys.exit(f"{text!r} takes {-count} tokens, more than its bytes")
        print(json.dumps(list(found[:count])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "special" in sys.argv[2:])

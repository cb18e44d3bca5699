"""What all protocols share: from the fields of a body to the engine, and from there to answers.

`body`, `options`, `constraints` and `conversation` are parts of bodies. `generate` is the one way
in: it turns a body into requests of the engine, with `prompts`, `token_options` and
`answer_format`. `answers` is the one way out.
"""

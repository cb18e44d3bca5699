"""What all protocols share: from the fields of a body to the engine, and from there to answers.

`schema` has the parts of bodies, `prompt` turns conversations and texts into tokens, `submit` is
the one way in, `writer` the one way out.
"""

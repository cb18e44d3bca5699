"""The bodies of the API, one file per kind of request: what may be asked, what is answered.

Agents send more fields than they document, and newer ones than we know: what is unknown is ignored,
and the answer's header `X-Ignored-Fields` names it, so that a misspelt `max_new_token` is found.
"""

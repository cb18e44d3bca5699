"""The bodies of requests and answers, one module per protocol.

Agents send fields that they do not document, and newer ones than this server knows. Unknown fields
are ignored, and the answer's header `X-Ignored-Fields` names them: a misspelt `max_new_token` is
found there.
"""

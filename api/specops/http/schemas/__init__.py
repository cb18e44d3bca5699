"""The bodies of the API, one file per kind of request: what may be asked, what is answered.

Unknown fields are refused rather than ignored: a misspelt `max_new_token` should not cost a
minute of generating the default.
"""

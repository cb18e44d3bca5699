"""The states in which a panel may be empty. Every panel declares one (`empty_when`) and shows its
word; in any other state, tests count a panel without data as a fault.
"""

from enum import StrEnum


class Empty(StrEnum):
    """A state in which a panel has no data; the value is the word that it shows instead."""

    UNREACHABLE = "unreachable"  # no API answers Prometheus; otherwise the panel has data
    NOT_READY = "no model yet"
    TOO_EARLY = "too early"  # the service is up for less than two minutes
    IDLE = "no traffic"  # no request now, or too few
    NO_REQUESTS = "no requests"  # none in the time range
    NO_PROMPTS = "no prompts"  # idle, or every prompt is known already
    NO_DRAFTS = "no drafts"  # idle, speculation is off, or no text repeats
    NO_SUGGESTIONS = "no suggestions"  # no editor asks
    NO_GATEWAY = "no gateway"  # one replica
    NO_QUOTA = "no quota"  # the processors have no limit
    NO_QUEUE = "no queue"  # SPECOPS_QUEUE_SIZE=0
    NO_STATES = "no recurrent layers"
    NEVER = "none"  # nothing of the kind happened in the time range: refusals, failures, lost time

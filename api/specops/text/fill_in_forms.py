"""The special tokens with which each family of models was trained to fill in a gap.

They mark the text before the gap, the text after it, and the beginning of the answer.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FillInForm:
    """The spelling of one family's special tokens.

    Attributes:
        before: marks the text before the gap.
        behind: marks the text after the gap.
        gap: marks the beginning of the answer. Empty: the text before the gap comes last, and the
            answer follows it.
    """

    before: str
    behind: str
    gap: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """All of its tokens."""
        return tuple(filter(None, (self.before, self.behind, self.gap)))


FORMS = (
    FillInForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite
    FillInForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    FillInForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillInForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek
    FillInForm("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    FillInForm("<PRE>", "<SUF>", "<MID>"),
    FillInForm("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
    FillInForm("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon H1
    FillInForm("[PREFIX]", "[SUFFIX]"),  # Codestral
)
# Tokens before a repository's name and before the name of each of its files.
REPOSITORY = ("<|repo_name|>", "<repo_name>", "<|reponame|>", "<reponame>")
FILE = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<|filename|>", "<filename>")
# Tokens that also end the text of a gap: those that begin another file, and others.
ENDS = (*REPOSITORY, *FILE, "<|fim_pad|>", "<|endoftext|>", "<fim_pad>", "<|EOT|>", "▁<EOT>")

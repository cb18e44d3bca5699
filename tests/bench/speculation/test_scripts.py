"""A script is right as often as it is told to be."""

from bench.speculation.scripts import Script

VOCAB = 320
PROMPT = (5, 6, 7)
TEXT = [(7 * index) % VOCAB for index in range(60)]


def make(acceptance: float) -> Script:
    return Script(acceptance, [(PROMPT, TEXT)], vocab_size=VOCAB)


def test_is_wrong_at_the_given_rate_at_positions_that_the_seed_fixes() -> None:
    text = [0] * 20_000

    def right(seed: int) -> list[bool]:
        script = Script(0.7, [(PROMPT, text)], vocab_size=VOCAB, seed=seed)
        return [token == 0 for token in script.after(0, PROMPT, len(text))]

    assert abs(sum(right(1)) / len(text) - 0.7) < 0.02  # six standard deviations
    assert right(1) == right(1) != right(2)


def test_mistakes_do_not_depend_on_the_length_of_the_drafts() -> None:
    script = make(0.5)
    whole = script.after(0, PROMPT, 60)
    assert len({token == right for token, right in zip(whole, TEXT, strict=True)}) == 2
    for start in range(0, 57, 3):
        proposed = script.after(0, [*PROMPT, *TEXT[:start]], 3)
        assert proposed == whole[start : start + 3]


def test_proposes_nothing_where_the_sequence_went_another_way_or_has_ended() -> None:
    script = make(1)
    for text in ([*PROMPT, TEXT[0] + 1], [1, 2], [*PROMPT, *TEXT]):
        assert script.after(0, text, 2) == []

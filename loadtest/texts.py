"""Writes the load test's prompts: realistic, no two alike, each of a chosen length.

A server need not compute text that it has read before, and can draft text that it has written
before. So a load that repeats its prompts measures the cache. These prompts consist of sentences
with many slots, of passages from the English reference that comes with Python
(`pydoc_data.topics`), and of standard library code with other names, on which the demo pair was not
trained. Each begins with generated text. People, places and things stay the same throughout a
conversation.
"""

import json
import os
import re
import sysconfig
from argparse import ArgumentParser
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from pydoc_data.topics import topics
from random import Random

Encode = Callable[[str], Sequence[bytes]]  # a text's tokens, as their spellings

CHAT, CONVERSATION, SUMMARY, DOCUMENT = "chat", "conversation", "summary", "document"
CODE, STRUCTURED = "code", "structured"
# The kinds, and the minimum number of tokens of a prompt for which the kind is drawn.
KINDS = {CHAT: 0, CONVERSATION: 200, SUMMARY: 150, DOCUMENT: 150, CODE: 60, STRUCTURED: 100}
# The same list as in `training/corpus.py`, which is not in the image.
HELD_OUT = (
    "argparse", "bisect", "calendar", "cmd", "configparser", "csv", "difflib", "fileinput",
    "fractions", "ftplib", "graphlib", "gzip", "heapq", "imaplib", "ipaddress", "json",
    "mailbox", "netrc", "pprint", "queue", "sched", "shelve", "shlex", "smtplib", "statistics",
    "tarfile", "textwrap", "timeit", "tomllib", "uuid", "zipfile",
)  # fmt: skip

# A value may contain slots, too; `{5-90}` is a number.
_SLOTS = {
    name: values.split("|")
    for name, values in {
        "first": "Maria|Tom|Aisha|Jonas|Priya|Luca|Hannah|Diego|Mei|Omar|Sofia|Peter|Ines|Kofi|"
        "Elena|Marcus|Yuki|Nora|Samuel|Leila|Victor|Anna|Rashid|Clara|Ben|Ingrid|Pablo|Ruth",
        "last": "Keller|Okafor|Lindgren|Silva|Tanaka|Novak|Murphy|Rossi|Haddad|Jensen|Moreau|Singh|"
        "Fischer|Castro|Novotny|Walker|Demir|Larsen|Costa|Park|Weber|Mensah|Ivanov|Brooks",
        "person": "{first} {last}",
        "city": "Leeds|Porto|Bergen|Graz|Lyon|Tampere|Ghent|Valencia|Krakow|Cork|Basel|Turin|Malmo|"
        "Utrecht|Denver|Halifax|Nagoya|Accra|Lima|Perth|Pune|Izmir|Bristol|Dresden|Austin|Quito",
        "place": "a bakery|an accounting office|a bike shop|a dental practice|a plant nursery|"
        "a primary school|a small hotel|a printing firm|a town library|an animal shelter|"
        "a furniture workshop|a travel agency|a film club|a brewery|a law office|a wholesaler",
        "job": "a nurse|a project manager|a beginner|a teacher|an electrician|a data analyst|"
        "a new colleague|a student of {subject}|an auditor|a volunteer|a retired engineer",
        "subject": "biology|history|economics|physics|law|music|statistics|architecture|nutrition|"
        "geography|philosophy|accounting|linguistics|computer science|chemistry|marketing",
        "thing": "booking system|delivery van|website|heating|newsletter|storage room|price list|"
        "coffee machine|phone line|payroll program|garden|customer survey|backup server|"
        "training plan|roof|photo archive|ticket machine|cash register|reading group|parking lot",
        "problem": "missed deliveries|late invoices|a broken pump|long queues|double bookings|"
        "rising rents|wrong addresses|sick leave|noise complaints|a power cut|lost passwords|"
        "unclear instructions|bad weather|slow internet|missing parts|too many meetings",
        "task": "plan the move of the {thing} to {town}|explain {subject} to {job}|"
        "write a polite letter about {problem}|compare two offers to repair the {thing}|"
        "prepare a talk of {5-50} minutes about {subject}|cut the cost of the {thing} by {5-40} %|"
        "find the reason for {problem}|show {12-400} people how the {thing} works|"
        "invite {12-400} guests to {town}|choose a course on {subject}|"
        "reply to {person}, who complains about {problem}|organize a weekend in {town}",
        "month": "January|February|March|April|May|June|July|August|September|October|November",
        "date": "{1-28} {month} {2012-2024}",
        "due": "{1-28} {month} {2026-2031}",
        "staff": "{3-90}",
        "fact": "We have {200-9800} euros for the {thing}.|"
        "The {thing} has to be ready by {due}.|"
        "{person} thinks that the {thing} is the real problem.|The {thing} is {2-38} years old.|"
        "Last {month} we lost {3-90} customers because of {problem}.|"
        "{20-950} people were asked about the {thing}, and {2-19} complained about {problem}.|"
        "Our {thing} needs {3-240} minutes a day, which {person} calls too long.|"
        "I have spoken to {person}, {job}, about {problem}, but got no clear answer.|"
        "In {town} they do it with {2-30} people and a rented {thing}.|"
        "The last time, on {date}, the {thing} failed because of {problem}.|"
        "There are {staff} of us, and only {person} understands the {thing}.|"
        "I would rather keep the {thing} and change something else.|"
        "Since {date} the {thing} has been looked after by {person}, {job}.|"
        "We tried it with {subject} students from {town}: {problem}, again.|"
        "We cannot afford a new {thing} this year, says {person}.",
        "who": "I run {place} in {city} with {staff} employees.|I work at {place} near {city}.|"
        "My neighbour {person} is {job}.|I live in {city} and ask for {person}, {job}.|"
        "I volunteer for {place} in {city}, together with {person}.|Greetings from {city}.",
        "ask": "How would you {task}?|What is a good way to {task}?|Can you help me to {task}?|"
        "By {due} I have to {task}. Where do I begin?|Which mistakes should I avoid if I {task}?|"
        "What does it take to {task}?|Why is it so hard to {task}?",
        "form": "Answer in {2-9} sentences.|Give me {3-9} points.|"
        "Write it as an e-mail to {person}.|"
        "Explain it to {job}.|Be brief, please.|Add an example from {city}.|",
        "role": "You are the assistant of {place} in {city}. Questions come from {person}'s team.|"
        "You help {job} with {subject}. Be friendly and exact.|"
        "You answer for {person}, {job} in {city}. Never promise a date before {due}.|"
        "You are an expert on {subject} who writes for {job}. Keep to {2-9} paragraphs.",
        "summary": "Sum up the following pages for {person}, {job}, in {3-9} sentences.|"
        "{person} has {2-15} minutes before a meeting in {city}. What are the main points of this?|"
        "Here are my notes of {date} for {place}. Make a short summary for {job}, please.",
        "document": "I am {job} and read this for a course on {subject} in {city}, due {due}:|"
        "{person} sent me this on {date}, and I have a question about it.|"
        "Page {2-900} of what {place} in {city} gives to {job}:",
        "doubt": "What does the part that begins with “{}” mean for {job}? {form}|"
        "Please explain “{}” in simpler words. {form}|"
        "{person} says that “{}” is wrong. Is it, and why? {form}",
        "explain": "I live in {city}. What do I have to know about “{}” in Python?|"
        "{person} asked me on {date} about “{}” in Python. Can you explain it?",
        "more": "Thanks. Can you give {job} an example? {form}|"
        "What would {person} ask next? {form}|"
        "And how would {person} explain that to {job} in {town}? {form}|"
        "Is there anything about it that goes wrong because of {problem}? {form}|"
        "Now shorten that to {2-6} sentences, for the {thing} of {place}.",
        "code": "Please finish this code; {person} needs it on {due}.|"
        "Continue the last function as {person} in {city} would. Only code, please.|"
        "What comes next in this module of our {thing}? Write the next {5-40} lines.",
        "structured": "Here is the data of {place} in {city} from {date}. {turn}",
        "turn": "Which row is unusual, and why?|Add the next {3-12} rows in the same format.|"
        "Turn the first {3-12} rows into YAML.|Describe it to {person} in {2-6} sentences.",
        "record": '{"order": {10000-99999}, "customer": "{person}", "city": "{city}", '
        '"items": {1-40}, "total": {10-990}.{10-99}, "shipped": "20{10-29}-0{1-9}-{10-28}"}'
        "|{10-28}/{month}/20{10-29}:{10-23}:{10-59}:{10-59} {city} [{100-999}] GET"
        " /{subject}/{100-99999} {200-504} {1-9000} ms|"
        "INSERT INTO visits VALUES ({1000-99999}, '{person}', '{city}', '{subject}', {1-500});|"
        "{1000-99999},{person},{city},{subject},{1-400},{1-99}.{10-99},{date}|"
        "- name: {person}\n  city: {city}\n  skills: [{subject}, {subject}]\n  level: {1-90}",
        "name": "Ledger|Route|Badge|Frame|Token|Parcel|Cell|Batch|Label|Queue|Sheet|Grid|Store",
        "verb": "load|merge|check|count|pick|send|trim|scan|store|split|match|rank|wrap|join",
        "noun": "ledger|route|badge|frame|token|parcel|cell|index|batch|label|queue|sheet|lease",
        "module": '"""The {noun}s of {place} in {city}: {verb} and {verb} them.\n\n'
        'Changed by {person} on {date}, because of {problem}.\n"""\n',
    }.items()
}
_SLOTS["town"] = _SLOTS["city"]
# The people, places and things of a conversation, by slot; those of earlier topics are keys of
# their own.
Scene = dict[str, str]
_MATTER = ("person", "job", "subject", "thing", "problem", "town", "due")
_KEPT = ("city", "place", "staff", *_MATTER)
_SLOT = re.compile(r"\{([a-z]+|\d+-\d+)\}")
# The pre-tokenization of byte-level BPE, which encodes each part separately.
_PART = re.compile(r" ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+(?!\S)|\s+")
_REST = 0.02  # share of a text that may be dropped so that it ends with a line
_WORDS = 6  # words of a quotation
_SAMPLE, _EVERY = 4096, 2  # common words come from every second sample of this many characters
_NAMES = re.compile(r"(?:\bdef |\bself\.)([a-z]\w{3,})")
_BEGIN = re.compile(r"^(?:    )?(?:def|class) ", re.MULTILINE)


def fill(rng: Random, pattern: str, scene: Scene | None = None) -> str:
    """Fill each slot of a pattern, from the scene if it has a value, or at random.

    Args:
        rng: random numbers.
        pattern: text with slots in braces.
        scene: values of a conversation, which may gain some; None: all are random.
    """

    def value(slot: re.Match[str]) -> str:
        low, is_range, high = slot[1].partition("-")
        if is_range:
            return str(rng.randint(int(low), int(high)))
        if scene is None or low not in _KEPT:
            return some(rng, low, scene)
        if low not in scene:
            named = {*scene.values()}
            drawn = (some(rng, low) for _ in range(999))  # all may be in use
            scene[low] = next((one for one in drawn if one not in named), "") or some(rng, low)
        return scene[low]

    return _SLOT.sub(value, pattern)


def some(rng: Random, slot: str, scene: Scene | None = None) -> str:
    """A random value of a slot, with its own slots filled."""
    return fill(rng, rng.choice(_SLOTS[slot]), scene).strip(" ")


@cache
def _reference() -> tuple[str, list[int], list[tuple[str, int]]]:
    """The English reference, starts of its paragraphs, and titles and starts of its pages."""
    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    pages = re.finditer(r"^(\S.*)\n\*+\n\n(?=\w)", text, re.MULTILINE)
    begins = [at.end() for at in re.finditer(r"\n\n(?=\w)", text)]
    return text, begins, [(page[1].replace('"', ""), page.end()) for page in pages]


@cache
def _code() -> tuple[str, list[int]]:
    """Code on which the demo pair was not trained, and the starts of its functions and classes."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [library / f"{name}.py" for name in HELD_OUT]
    files += [file for name in HELD_OUT for file in sorted((library / name).glob("*.py"))]
    text = "\n".join(file.read_text("utf-8") for file in files if file.is_file())
    return text, [at.start() for at in _BEGIN.finditer(text)]


def _alike(part: str) -> str:
    """The same number for all numbers of one length, since few numbers occur twice."""
    digits = part.lstrip(" ")
    return part[: -len(digits)] + ("73915264" * 99)[: len(digits)] if digits.isdigit() else part


@cache
def _parts() -> dict[str, list[str]]:
    """The common parts of texts, by a separator that never merges with them into one token."""
    slots = "\n".join(value for values in _SLOTS.values() for value in values)
    known = {*_PART.findall(slots), *(_alike("1" * n) for n in range(1, 10))}
    for text, _, *_ in (_reference(), _code()):
        some_of = (text[at : at + _SAMPLE] for at in range(0, len(text), _EVERY * _SAMPLE))
        seen = Counter(_alike(part[0]) for sample in some_of for part in _PART.finditer(sample))
        known |= {part for part, times in seen.items() if times > 1}
    known |= {f" {part}" for part in known if part.isalnum()}
    blank = {part for part in known if not part.strip()}
    behind = {part for part in known - blank if part[0] == " "}
    return {" x": sorted(blank), " the": sorted(behind), "\n": sorted(known - blank - behind)}


class Ruler:
    """Estimates token counts from known words, without asking the server each time."""

    def __init__(self, encode: Encode) -> None:
        self._tokens: dict[str, int] = {}
        for between, parts in _parts().items():
            self._learn(encode, parts, between)
        self._rate = sum(self._tokens.values()) / sum(map(len, self._tokens))

    def _learn(self, encode: Encode, parts: Sequence[str], between: str) -> None:
        """Count the tokens that start within each part."""
        for some_of in (parts[at : at + 4000] for at in range(0, len(parts), 4000)):
            text = between + "".join(part + between for part in some_of)
            begins = [0, *accumulate(map(len, encode(text)))]
            at = len(between) + begins[-1] - len(text.encode())  # some tokenizers add a space
            for part in some_of:
                end = at + len(part.encode())
                tokens = bisect_left(begins, end) - bisect_left(begins, at)
                self._tokens[part] = tokens
                at = end + len(between)

    def _part(self, part: str) -> float:
        return self._tokens.get(_alike(part)) or max(1.0, len(part) * self._rate)

    def count(self, text: str) -> float:
        """The estimated number of tokens of a text."""
        return sum(map(self._part, _PART.findall(text)))

    def cut(self, text: str, tokens: float) -> str:
        """The start of a text with about this many tokens, in whole words."""
        for part in _PART.finditer(text):
            tokens -= self._part(part[0])
            if tokens < 0:
                return text[: part.start()]
        return text


@dataclass(frozen=True, slots=True)
class Frame:
    """Tokens that a chat template adds for a question, a system message, and an earlier turn."""

    question: int = 0
    system: int = 0
    turn: int = 0


NO_FRAME = Frame()


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt; in a chat with a system message and earlier turns, if any."""

    prompt: str
    system: str = ""
    history: tuple[str, ...] = ()
    scene: Scene = field(default_factory=dict)


class Writer:
    """Writes prompts for one model.

    Args:
        encode: the model's tokenizer.
        frame: tokens that its chat template adds.
        chat: whether the model chats; otherwise it continues texts.
    """

    def __init__(self, encode: Encode, frame: Frame, *, chat: bool) -> None:
        self.ruler, self.frame, self.chat = Ruler(encode), frame, chat
        self._ratio: dict[str, float] = {}  # actual tokens per estimated token, by kind
        for kind in KINDS:
            made = [self.text(Random(number), kind, 600) for number in range(3)]
            whole = "\n\n".join("\n\n".join((t.system, *t.history, t.prompt)) for t in made)
            self._ratio[kind] = len(encode(whole)) / self.ruler.count(whole)

    def text(self, rng: Random, kind: str, tokens: float) -> Text:
        """A prompt with about this many tokens, including those of the chat template."""
        count, system, scene = self.ruler.count, "", Scene()
        room = tokens - self.frame.question if self.chat else tokens
        room /= self._ratio.get(kind, 1)
        if self.chat and kind in (CHAT, CONVERSATION) and room > 120 and rng.random() < 0.5:
            system = some(rng, "role", scene)
            room -= self.frame.system + count(system)
        if kind == CHAT or (kind == CONVERSATION and not self.chat):
            end = f"{some(rng, 'ask', scene)} {some(rng, 'form', scene)}".strip()
            told = self.sentences(rng, "who", room - count(end), scene)
            return Text(told + end, system, scene=scene)
        if kind == CONVERSATION:
            title, at = rng.choice(_reference()[2])
            ask = some(rng, "explain", scene).replace("{}", title)
            prompt = some(rng, "more", scene)
            room -= self.frame.turn + count(ask) + count(prompt)
            return Text(prompt, system, (ask, self.passage(rng, room, at)), scene)
        begin, end = some(rng, kind, scene) + "\n\n", ""
        if kind == CODE:
            begin, end = (begin + "```python\n", "\n```") if self.chat else ("", "")
        elif kind == DOCUMENT:
            end = "\n\n" + some(rng, "doubt", scene)
        body = {CODE: self.code, STRUCTURED: self.rows}.get(kind, self.passage)
        made = body(rng, room - count(begin + end) - 1.5 * _WORDS * ("{}" in end))
        quotes = [line for line in made.split("\n") if len(line.split()) > _WORDS] or [made]
        quote = " ".join(rng.choice(quotes).split()[:_WORDS])
        return Text(begin + made + end.replace("{}", quote), scene=scene)

    def role(self, rng: Random, tokens: float) -> str:
        """A long system message."""
        return self.sentences(rng, "role", tokens / self._ratio[CHAT], Scene())

    def follow_up(self, rng: Random, text: Text) -> str:
        """The user's next turn."""
        return some(rng, "more", text.scene) if self.chat else self.code(rng, 40)

    def sentences(self, rng: Random, begin: str, tokens: float, scene: Scene) -> str:
        """A sentence for a slot, then facts, in paragraphs, with a space at the end.

        When all facts about a topic are used up, a new topic starts, with other people.

        Args:
            rng: random numbers.
            begin: slot of the first sentence.
            tokens: approximate length.
            scene: values of the conversation, which gains new ones.
        """
        text, left, facts = "", tokens, [*_SLOTS["fact"]]
        more = some(rng, begin, scene)
        while more:
            left -= self.ruler.count(f" {more}")
            text += more + ("\n\n" if rng.random() < 0.2 else " ")
            if not facts:
                facts = [*_SLOTS["fact"]]
                for named in [scene.pop(slot) for slot in _MATTER if slot in scene]:
                    scene[named] = named
            drawn = {fill(rng, fact, scene): fact for fact in rng.sample(facts, min(4, len(facts)))}
            more = min(drawn, key=lambda fact: abs(left - self.ruler.count(fact)))
            facts.remove(drawn[more])
            if abs(left - self.ruler.count(more)) > abs(left):
                break
        return text

    def passage(self, rng: Random, tokens: float, at: int | None = None) -> str:
        """Paragraphs of the English reference, starting at `at` or at a random place."""
        text, begins, _ = _reference()
        places = iter([] if at is None else [at])

        def window(size: int) -> str:
            at = next(places, None) or rng.choice(begins)
            return text[at : at + size]

        return self._windows(tokens, window)

    def code(self, rng: Random, tokens: float) -> str:
        """Functions and methods with changed names, after a generated comment."""
        text, begins = _code()

        def window(size: int) -> str:
            at = rng.choice(begins)
            code = text[at : at + size]
            names = [name for name in dict.fromkeys(_NAMES.findall(code)) if rng.random() < 0.6]
            if code.startswith(" "):
                code = fill(rng, "class {name}{name}:\n\n") + code
            if not names:
                return code
            others = {name: fill(rng, "{verb}_{noun}") for name in names}
            return re.sub(rf"\b({'|'.join(names)})\b", lambda name: others[name[1]], code)

        begin = some(rng, "module") if tokens > 150 else fill(rng, "# {person}, {date}\n")
        made = begin + "\n\n" + self._windows(tokens - self.ruler.count(begin), window)
        whole, _, rest = made.rpartition("\n")
        return f"{whole}\n" if self.ruler.count(rest) < _REST * tokens else made

    def rows(self, rng: Random, tokens: float) -> str:
        """Records of one format, one per line."""
        form = rng.choice(_SLOTS["record"])
        made, left = "", tokens
        while left > 0:
            row = fill(rng, form) + "\n"
            made += self.ruler.cut(row, left)
            left -= self.ruler.count(row)
        return made

    def block(self, rng: Random, tokens: float) -> str:
        """A block of a trace's prompt."""
        begin, tokens = some(rng, "fact") + " ", tokens / self._ratio[SUMMARY]
        made = begin + self.passage(rng, tokens - self.ruler.count(begin))
        return self.ruler.cut(made, tokens)

    def _windows(self, tokens: float, window: Callable[[int], str]) -> str:
        """Concatenated passages with this many tokens; `window` returns one of a given size."""
        made = ""
        while (left := tokens - self.ruler.count(made)) >= 1:
            part = self.ruler.cut(window(8 * int(left) + 80), left)
            if not part:
                break
            made += f"\n\n{part}" if made else part
        return made


def rough(text: str) -> list[bytes]:
    """A rough tokenizer for unknown models: parts of four characters."""
    return [text[at : at + 4].encode() for at in range(0, len(text), 4)]


def lines(count: int, tokens: int, answer: int, seed: object) -> str:
    """Prompts for other load generators, as lines of JSON.

    Args:
        count: number of prompts.
        tokens: tokens of a prompt.
        answer: tokens of an answer.
        seed: determines the prompts.
    """
    writer, made = Writer(rough, NO_FRAME, chat=True), ""
    for number in range(count):
        rng = Random(f"{seed}:{number}")
        prompt = writer.text(
            rng, rng.choice([CHAT, SUMMARY, DOCUMENT, CODE, STRUCTURED]), tokens
        ).prompt
        made += json.dumps({"prompt": prompt, "output_tokens_count": answer}) + "\n"
    return made


if __name__ == "__main__":
    parser = ArgumentParser(description="Print new prompts, which no cache has, as lines of JSON.")
    parser.add_argument("--num-prompts", type=int, default=100)
    parser.add_argument("--input-len", type=int, default=400)
    parser.add_argument("--output-len", type=int, default=144)
    parser.add_argument("--seed", default=os.urandom(4).hex(), help="random if not given")
    given = parser.parse_args()
    print(lines(given.num_prompts, given.input_len, given.output_len, given.seed), end="")

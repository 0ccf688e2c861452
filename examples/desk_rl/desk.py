# SPDX-License-Identifier: Apache-2.0
"""The environment: a desk that answers an agent's calls, one in each turn.

    customer : 3 pen and 2 lamp ? <turn> look pen <end> result 7 <turn> times 3 7 <end> result 21 <turn> look lamp <end> ...
    ... result 8 <turn> plus 21 8 <end> result 29 <turn> answer 29 <end>

Prices are in the desk's own record of the question, so the agent has to look them up. A turn is one call and <end>. The
reward is 1 for the right answer; a call that the desk does not understand, a wrong answer and too many turns end the
conversation with 0. Every word, and every number from 0 to 50, is one token.
"""

import random
from dataclasses import dataclass

ITEMS = "pen cup book lamp rope coin ring bell key map hat shoe".split()
RULES = ("you serve a customer at the desk . in each turn you make one call and then wait for the result . "
         "look ITEM gives the price of an item . times A B multiplies two numbers . plus A B adds two numbers . "
         "answer A tells the customer the total and ends the talk . never guess a price , since prices differ "
         "from day to day . use no result of another day . ").split()  # fmt: skip
TURN, END = "<turn>", "<end>"
MOST = 50  # the largest number that there is a word for
WORDS = [*dict.fromkeys([END, TURN, *RULES, *ITEMS, *"customer : and ? result".split()]),
         *map(str, range(MOST + 1))]  # fmt: skip
IDS = {word: number for number, word in enumerate(WORDS)}
CALL_TOKENS = 4  # at most: a name, two numbers, <end>
MAX_TURNS = 8  # six are enough


def ids_of(words):
    return [IDS[word] for word in words]


def words_of(ids):
    return [WORDS[number] for number in ids]


@dataclass(frozen=True)
class Question:
    """What a customer wants, and what only the desk knows: the prices."""

    name: str
    counts: tuple[int, int]
    items: tuple[str, str]
    prices: dict

    @property
    def total(self):
        return sum(count * self.prices[item] for count, item in zip(self.counts, self.items, strict=True))

    def prompt(self):
        (a, b), (first, second) = self.counts, self.items
        return [*RULES, "customer", ":", str(a), first, "and", str(b), second, "?", TURN]

    def reply(self, call):
        """What the desk says to a call, words with <end>: (result, None), or (None, reward) where the talk ends."""
        match call:
            case ["look", item, "<end>"] if item in self.prices:
                result = self.prices[item]
            case ["times", a, b, "<end>"] if a.isdigit() and b.isdigit():
                result = int(a) * int(b)
            case ["plus", a, b, "<end>"] if a.isdigit() and b.isdigit():
                result = int(a) + int(b)
            case ["answer", a, "<end>"]:
                return None, float(a == str(self.total))
            case _:
                return None, 0.0
        return (["result", str(result), TURN], None) if result <= MOST else (None, 0.0)


def make_question(name, seed):
    rng = random.Random(f"{name} {seed}")
    counts = rng.randint(2, 4), rng.randint(2, 4)
    return Question(name, counts, tuple(rng.sample(ITEMS, 2)), {item: rng.randint(1, 6) for item in ITEMS})


def teach(question, mistakes, rng):
    """The talk of a teacher who makes a mistake in so many of the turns: [(words, whether they are the teacher's)]."""
    talk, seen = [(question.prompt(), False)], []
    (a, b), (first, second) = question.counts, question.items
    plan = [lambda: ["look", first], lambda: ["times", a, seen[0]], lambda: ["look", second],
            lambda: ["times", b, seen[2]], lambda: ["plus", seen[1], seen[3]], lambda: ["answer", seen[4]]]  # fmt: skip
    for step in plan:
        call = [str(word) for word in step()]
        if rng.random() < mistakes:
            call = spoiled(call, rng)
        call.append(END)
        talk.append((call, True))
        result, reward = question.reply(call)
        if reward is not None:
            break
        seen.append(int(result[1]))
        talk.append((result, False))
    return talk


def spoiled(call, rng):
    """The call with a mistake: another item or number, another tool, or an answer too early."""
    kind = rng.randrange(3)
    if kind == 0:
        return ["answer", str(rng.randint(2, MOST))]
    if call[0] == "look":
        return ["look", rng.choice(ITEMS)] if kind == 1 else ["times", str(rng.randint(2, 4)), str(rng.randint(1, 6))]
    if kind == 1 and len(call) == 3:
        return [{"times": "plus", "plus": "times"}[call[0]], *call[1:]]
    wrong = call.copy()
    wrong[rng.randrange(1, len(call))] = str(rng.randint(1, MOST))
    return wrong

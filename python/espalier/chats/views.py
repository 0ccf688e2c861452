# SPDX-License-Identifier: Apache-2.0
"""Renderings of the beginnings of one conversation: the prompt of each turn, and the conversation up to its answer.

Transformers checks and copies all messages at every call. Here that is done once for a conversation, and its template is
executed directly. A template that only appends is executed once for all turns. The text of the whole conversation is compared
with that of apply_chat_template; where they differ, apply_chat_template renders every turn.
"""

from functools import lru_cache

ROUND = frozenset(("index", "index0", "first", "previtem", "depth", "depth0", "cycle"))  # of a loop: they do not look ahead


class Views:
    """prompt(i): the first i messages with the generation prompt; answered(i): the first i + 1 messages without it.
    render(count, add_generation_prompt) renders the first `count` messages."""

    def __init__(self, render):
        self._render = render

    def prompt(self, index):
        return self._render(index, True)

    def answered(self, index):
        return self._render(index + 1, False)


class AppendedViews(Views):
    """Those of a template that only appends. `ends`: the length of `text` after each message, from none on."""

    def __init__(self, text, ends, generation_prompt, end):
        self._text, self._ends = text, ends
        self._generation_prompt, self._end = generation_prompt, end

    def prompt(self, index):
        return self._text[: self._ends[index]] + self._generation_prompt

    def answered(self, index):
        return self._text[: self._ends[index + 1]] + self._end


def views_of(tokenizer, messages, tools, arguments, standard):
    """The views of a conversation. standard(count, add_generation_prompt) renders by apply_chat_template, and raises what
    the template raises."""
    count = len(messages)
    whole = standard(count, False)
    try:
        direct = _Direct(tokenizer, messages, tools, arguments)
        if appends(direct.source):
            views: Views = direct.appended()
        else:
            views = Views(direct.render)
        if views.answered(count - 1) == whole:
            return views
    except Exception:
        pass
    return Views(standard)


class _Messages(list):
    """Messages that note how much text there is whenever the template asks for the next of them."""

    def __init__(self, messages):
        super().__init__(messages)
        self.pieces: list[str] = []
        self.ends: list[int] = []

    def __iter__(self):
        length = counted = 0
        for message in super().__iter__():
            length += sum(map(len, self.pieces[counted:]))
            counted = len(self.pieces)
            self.ends.append(length)
            yield message
        self.ends.append(length + sum(map(len, self.pieces[counted:])))


class _Direct:
    """Executes a chat template as apply_chat_template does, without its copies of all messages. May raise anything."""

    def __init__(self, tokenizer, messages, tools, arguments):
        from transformers.utils import chat_template_utils as utils

        self.source = tokenizer.get_chat_template(None, tools)
        self._template = utils._compile_jinja_template(self.source)
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        alias = getattr(utils, "_alias_reasoning_fields", None)
        self._messages = alias(messages) if alias else messages
        self._variables = {**tokenizer.special_tokens_map, "documents": None, "tools": tools, **arguments}

    def render(self, count, add_generation_prompt):
        return self._template.render(
            messages=self._messages[:count], add_generation_prompt=add_generation_prompt, **self._variables
        )

    def appended(self):
        def pieces(messages, add_generation_prompt):
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._variables
            ):
                messages.pieces.append(piece)
            return "".join(messages.pieces)

        whole = _Messages(self._messages)
        text = pieces(whole, False)
        first = _Messages(self._messages[:1])
        prompt = pieces(first, True)
        return AppendedViews(text, whole.ends, prompt[first.ends[-1] :], text[whole.ends[-1] :])


@lru_cache(maxsize=16)
def appends(source):
    """Whether a template provably writes its messages one after the other, each without regard to later ones.

    It has one loop over all messages, which looks at none but the current one and the first. What stands behind the loop uses
    nothing that the loop or what stands before it has set. The generation prompt is used there alone.
    """
    from jinja2 import nodes
    from transformers.utils import chat_template_utils as utils

    tree = utils._compile_jinja_template(source).environment.parse(source)

    def names(tree, name, context="load"):
        return [node for node in tree.find_all(nodes.Name) if node.name == name and node.ctx == context]

    loops = [
        at
        for at, node in enumerate(tree.body)
        if isinstance(node, nodes.For) and isinstance(node.iter, nodes.Name) and node.iter.name == "messages"
    ]
    if len(loops) != 1 or any(
        tree.find_all((nodes.Macro, nodes.CallBlock, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block))
    ):
        return False
    loop = tree.body[loops[0]]
    before, after = tree.body[: loops[0]], tree.body[loops[0] + 1 :]
    if loop.test or loop.recursive or loop.else_ or any(loop.find_all((nodes.Break, nodes.Continue))):
        return False
    firsts = [
        node
        for node in tree.find_all(nodes.Getitem)
        if isinstance(node.node, nodes.Name)
        and node.node.name == "messages"
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == 0
    ]
    if len(names(tree, "messages")) != 1 + len(firsts) or names(tree, "messages", "store"):
        return False
    rounds = [
        node
        for node in loop.find_all((nodes.Getattr, nodes.Getitem))
        if isinstance(node.node, nodes.Name)
        and node.node.name == "loop"
        and (node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)) in ROUND
    ]
    if len(names(tree, "loop")) != len(rounds):
        return False
    if any(names(part, "add_generation_prompt") for part in (*before, loop)):
        return False
    changed = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"} | {
        node.name for node in tree.find_all(nodes.NSRef)
    }
    return not any(
        node.name in changed or node.name == "messages"
        for part in after
        for node in part.find_all(nodes.Name)
        if node.ctx == "load"
    )

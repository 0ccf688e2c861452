# SPDX-License-Identifier: Apache-2.0
"""What espalier.Step refuses, by name, and what a loop that fails leaves behind."""

import copy
import functools
import gc
import pickle
import warnings

import pytest
import torch

import espalier
from espalier.errors import InputError, Unsupported
from espalier.hf import patch, unpatch
from espalier.hf.float64 import InFloat64
from espalier.hf.shared_head import Head
from hf_models import DeepSpeedEngine, alone, branching_rows, make_model, worst_error

ROWS = [[1, 2, 3], [1, 2]]


def plan_of(rows, strategy="partition", token_budget=5):
    return espalier.plan(espalier.build(rows), token_budget=token_budget, strategy=strategy)


def step_of(model=None, **options):
    model = make_model("qwen3", torch.float32) if model is None else model
    return espalier.Step(model, plan_of(branching_rows()), **options)


@functools.cache
def small_model():
    return make_model("qwen3", torch.float32)


def no_backward(step):
    for batch in step:
        step.logprobs(batch)


def no_forward(step):
    for _ in step:
        pass


def one_backward_missing(step):
    for number, batch in enumerate(step):
        loss = step.logprobs(batch).sum()
        if number != 1:
            step.backward(loss)


def twice_forward(step):
    for batch in step:
        step.logprobs(batch)
        step.hidden(batch)


def twice_backward(step):
    for batch in step:
        loss = step.logprobs(batch).sum()
        step.backward(loss)
        step.backward(loss)


def backward_alone(step):
    for _ in step:
        step.backward(torch.zeros((), requires_grad=True))


def losses_of_all_so_far(step):
    total = 0
    for batch in step:
        total = total + step.logprobs(batch).sum()
        step.backward(total)


def backward_of_torch(step):
    for batch in step:
        step.logprobs(batch).sum().backward()


def an_older_one(step):
    batches = []
    for batch in step:
        batches.append(batch)
        step.backward(step.logprobs(batches[0]).sum())


def afterwards(step):
    for batch in step:
        step.backward(step.logprobs(batch).sum())
    step.logprobs(batch)


def backward_afterwards(step):
    for batch in step:
        loss = step.logprobs(batch).sum()
        step.backward(loss)
    step.backward(loss)


def many_numbers(step):
    for batch in step:
        step.backward(step.logprobs(batch))


def without_a_graph(step):
    for batch in step:
        step.backward(step.logprobs(batch).sum().detach())


def autocast_inside(step):
    for batch in step:
        with torch.autocast("cpu", torch.bfloat16):
            step.logprobs(batch)


def optimiser_inside(step):
    optimiser = torch.optim.SGD(small_model().parameters(), lr=1e-6)
    for batch in step:
        step.backward(step.logprobs(batch).sum())
        optimiser.step()


LOOPS = {
    no_backward: r"micro-batch \d+: expected step.backward\(loss\) before the next",
    no_forward: r"micro-batch \d+: expected step.logprobs\(batch\) before the next",
    one_backward_missing: r"micro-batch \d+: expected step.backward\(loss\) before the next",
    twice_forward: r"micro-batch \d+: expected one forward pass",
    twice_backward: r"micro-batch \d+: expected one step.backward",
    backward_alone: r"micro-batch \d+: expected step.logprobs\(batch\) before step.backward",
    losses_of_all_so_far: r"micro-batch \d+: expected gradients from the loss that step.backward\(loss\) was given",
    backward_of_torch: r"micro-batch \d+: expected gradients from the loss that step.backward\(loss\) was given",
    an_older_one: "expected the micro-batch that `for batch in step` gave last, received <espalier.StepBatch",
    afterwards: "expected the micro-batch that `for batch in step` gave last",
    backward_afterwards: "expected a call inside of `for batch in step`",
    many_numbers: r"loss: expected one number with a graph, received a tensor \[\d+\]",
    without_a_graph: r"loss: expected one number with a graph, received a tensor \[\] without a graph",
    autocast_inside: "autocast: expected the whole loop",
    optimiser_inside: r"micro-batch \d+: expected the parameters as they were",
}


@pytest.mark.filterwarnings("ignore:the loop over espalier.Step was left")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops(loop):
    for recompute in (False, True):
        with pytest.raises(InputError, match=LOOPS[loop]):
            loop(espalier.Step(small_model(), plan_of(ROWS, token_budget=2), recompute=recompute))
        small_model().zero_grad()


def test_outside_of_a_loop():
    step = step_of()
    for call in (step.logprobs, step.hidden, step.backward):
        with pytest.raises(InputError, match="expected a call inside of `for batch in step`"):
            call(None)


def leave_by_break(step, after):
    for number, batch in enumerate(step):
        step.backward(step.logprobs(batch).sum())
        if number == after:
            break


def leave_by_an_error(step, after):
    with pytest.raises(KeyError):
        for number, batch in enumerate(step):
            step.backward(step.logprobs(batch).sum())
            if number == after:
                raise KeyError


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("leave", [leave_by_break, leave_by_an_error])
def test_a_loop_that_is_left_early_says_so(leave, recompute):
    model, rows = make_model("qwen3"), branching_rows()
    step = step_of(model, recompute=recompute)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            for batch in step:
                step.logprobs(batch)
                break
    with pytest.warns(RuntimeWarning, match=r"was left after \d+ of 9 micro-batches had run backward.*step.discard"):
        leave(step, 6)
    assert gradients_of(model)
    other = step_of(model, recompute=recompute)  # over the same model
    for again in (step, other):
        with pytest.raises(InputError, match=r"a loop that was left after \d+ of 9 micro-batches .*step.discard"):
            leave_by_break(again, 0)
    with torch.no_grad():
        for batch in step:
            step.logprobs(batch)  # which adds no gradients
    step.discard()
    assert not gradients_of(model)
    with InFloat64():
        for batch in other:
            other.backward(-other.logprobs(batch).sum())
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert worst_error((1, ours), (1, alone(make_model("qwen3"), rows)[1])) <= 1e-12


@pytest.mark.parametrize("zero", [lambda model: model.zero_grad(), lambda model: model.zero_grad(set_to_none=False)])
def test_zeroed_gradients_are_none_of_a_part(zero):
    model = make_model("qwen3", torch.float32)
    step = step_of(model, recompute=True)
    with pytest.warns(RuntimeWarning, match="was left"):
        leave_by_break(step, 2)
    zero(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        leave_by_break(step, 10**6)  # to its end


def test_a_loop_that_is_held_and_begun_again():
    model = make_model("qwen3", torch.float32)
    step = step_of(model, recompute=True)
    loop = iter(step)
    step.backward(step.logprobs(next(loop)).sum())
    with pytest.warns(RuntimeWarning, match="was left after 1 of"), pytest.raises(InputError, match="was left after 1 of"):
        next(iter(step))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del loop  # which says nothing more


@pytest.mark.filterwarnings("ignore:the loop over espalier.Step was left")
@pytest.mark.parametrize("recompute", [False, True])
def test_a_loop_that_fails_leaves_the_model_usable(recompute):
    model, rows = make_model("qwen3_5"), branching_rows()
    step = step_of(model, recompute=recompute)

    def fail(when):
        for number, batch in enumerate(step):  # noqa: F821  deleted below
            step.backward(step.logprobs(batch).sum())  # noqa: F821
            if number == when:
                raise KeyError(number)

    for when in (0, 3):
        with pytest.raises(KeyError):
            fail(when)
        model.zero_grad()
        assert step._pass.frames == {}
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert type(model.forward) is Head and "forward" not in model.lm_head.__dict__
    with InFloat64():
        for batch in step:
            step.backward(-step.logprobs(batch).sum())
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert worst_error((1, ours), (1, alone(make_model("qwen3_5"), rows)[1])) <= 1e-12
    del step, batch
    gc.collect()
    unpatch(model)


def with_dropout():
    model = make_model("qwen3", torch.float32)
    model.model.layers[0].self_attn.attention_dropout = 0.1
    return model


def with_routers():
    model = make_model("qwen3_moe", torch.float32)
    model.config.output_router_logits = True
    return model


def with_a_wrapped_forward():
    model = make_model("qwen3", torch.float32)
    model.forward = model.forward
    return model


def with_a_compiled_layer():
    model = make_model("qwen3", torch.float32)
    model.model.layers[1].compile(backend="aot_eager")
    return model


def with_adapters(task_type="CAUSAL_LM", **settings):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type=task_type, target_modules=["q_proj"], **settings)
    return peft.get_peft_model(make_model("qwen3", torch.float32), config)


def with_prompt_tuning():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(make_model("qwen3", torch.float32), config)


def of_deepspeed():
    return DeepSpeedEngine(make_model("qwen3", torch.float32))


def in_a_wrapper():
    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make_model("qwen3", torch.float32)

    return Wrapper()


def sharded_by_deepspeed():
    model = make_model("qwen3", torch.float32)
    next(model.parameters()).ds_id = 0
    return model


def of_a_trainer_of_trl():
    model = make_model("qwen3", torch.float32)
    pytest.importorskip("trl.trainer.utils").add_fused_lm_head(model)
    return model


MODELS = {
    "aLoRA .alora_invocation_tokens.: expected adapters that act on all": lambda: with_adapters(
        alora_invocation_tokens=[5, 6]),
    "in the layers of the model, such as LoRA, received PROMPT_TUNING": with_prompt_tuning,
    "received a DeepSpeedEngine, whose own backward partitions": of_deepspeed,
    "received Wrapper around a Qwen3ForCausalLM, which is called in another way": in_a_wrapper,
    "received one that DeepSpeed has taken over": sharded_by_deepspeed,
    "received the fused head that a trainer of TRL has set; train by espalier.trl.patch": of_a_trainer_of_trl,
    "received Qwen3Model alone": lambda: make_model("qwen3", torch.float32).model,
    "output_router_logits: expected False": with_routers,
    "dropout: expected none in training": with_dropout,
    "expected the forward of Qwen3ForCausalLM itself": with_a_wrapped_forward,
    "not compiled, received a compiled model.layers.1": with_a_compiled_layer,
    "expected a model of Transformers as the backbone": lambda: torch.nn.Linear(2, 2),
    "backend: expected espalier under partition, received sdpa": lambda: patch(
        make_model("qwen3", torch.float32), backend="sdpa"),
}  # fmt: skip


@pytest.mark.parametrize("message", MODELS)
def test_models(message):
    with pytest.raises(Unsupported, match=message):
        no_forward(step_of(MODELS[message]()))


def test_other_backends_without_context():
    model, rows = patch(make_model("qwen3"), backend="sdpa"), branching_rows()
    step = espalier.Step(model, plan_of(rows, "tree-packing", 25))
    with InFloat64():
        for batch in step:
            step.backward(-step.logprobs(batch).sum())
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert worst_error((1, ours), (1, alone(make_model("qwen3"), rows)[1])) <= 1e-12


ARGUMENTS = {
    "plan: expected a Plan, as espalier.plan makes it, received Forest": dict(plan=espalier.build(ROWS)),
    "loss_mask: expected 2 rows, received 1": dict(loss_mask=[[0, 1, 1]]),
    "loss_mask: expected 2 entries in row 1 .*received shape": dict(loss_mask=[[0, 1, 1], [0, 1, 1]]),
    "loss_mask: expected 5 entries .*received 4": dict(loss_mask=torch.ones(4).numpy()),
    "loss_mask: expected weights >= 0, received -0.5 for token 1 of row 1$": dict(loss_mask=[[0, 1, 1], [0, -0.5]]),
    "received -100 for token 1 of row 0; for labels, pass labels != -100": dict(
        loss_mask=torch.tensor([7, -100, 8, 7, 8])),
    "loss_mask: expected finite numbers": dict(loss_mask=[[0, 1, float("nan")], [0, 1]]),
    "loss_mask: expected at least one token with a loss": dict(loss_mask=[[1, 0, 0], [1, 0]]),
}


@pytest.mark.parametrize("message", ARGUMENTS)
def test_arguments(message):
    arguments = dict(plan=plan_of(ROWS)) | ARGUMENTS[message]
    with pytest.raises(InputError, match=message):
        espalier.Step(None, **arguments)


def unweighted(step):
    for batch in step:
        step.backward(step.logprobs(batch).sum())


@pytest.mark.filterwarnings("ignore:the loop over espalier.Step was left")
def test_weights_that_nobody_asks_for():
    for weights in ([[0, 0.5, 0.5], [0, 1]], [[5, 6, 7], [8, 9]]):  # the second: labels without -100
        step = espalier.Step(small_model(), plan_of(ROWS), loss_mask=weights)
        with pytest.raises(InputError, match="expected a loss of batch.weights, since loss_mask has numbers other than"):
            unweighted(step)
        small_model().zero_grad()
    unweighted(espalier.Step(small_model(), plan_of(ROWS), loss_mask=[[5, True, 0], [0, 1.0]]))
    small_model().zero_grad()


def test_what_wrappers_hand_on():
    """Hooks that change the arguments of a model, which micro-batches do not have."""
    changes = {"attention_mask: expected a model whose wrappers": lambda ids: dict(attention_mask=torch.ones_like(ids)),
               "input_ids: expected a model whose wrappers pass on the tokens": lambda ids: dict(input_ids=ids + 1)}
    for message, change in changes.items():
        model = make_model("qwen3", torch.float32)
        model.register_forward_pre_hook(lambda _, args, kwargs, change=change: (args, kwargs | change(kwargs["input_ids"])),
                                        with_kwargs=True)  # fmt: skip
        with pytest.raises(Unsupported, match=message):
            unweighted(step_of(model))
    unweighted(step_of(with_adapters()))


def test_a_head_of_another_kind():
    model = make_model("qwen3", torch.float32)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    step = step_of(model)
    with pytest.raises(Unsupported, match="expected torch.nn.Linear .*received torch.nn.modules.container.Sequential"):
        no_backward(step)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies(how):
    step = espalier.Step(make_model("qwen3"), espalier.plan(espalier.build([[1, 2, 3], [1, 2, 4]]), token_budget=8))
    with pytest.raises(InputError, match="espalier.Step: expected no pickle or copy of a step, which holds a model"):
        how(step)

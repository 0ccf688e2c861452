# SPDX-License-Identifier: Apache-2.0
"""What is checked of patched models under DeepSpeed, on two ranks with their own rows: steps of its engine against those of the
unpatched model.

    python rank_processes.py deepspeed_rank_checks FOLDER 2     with ESPALIER_DEEPSPEED=all in the environment: the whole table
"""

import contextlib
import os
import sys
from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import peft
import pytest
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers import AutoConfig, AutoModelForCausalLM

import espalier
from espalier.error_ratio import MAX_RATIO, error_ratio
from espalier.errors import Unsupported
from espalier.hf import patch, patching, sharing, verify

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled
deepspeed.logger.setLevel("ERROR")

VOCABULARY = 61  # a size that nothing else has
MODEL = {"model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}  # fmt: skip
KINDS = {
    "qwen3": {},
    "tied": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_5_text": {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                     "linear_value_head_dim": 8},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "stablelm": {},  # a proof decides
}  # fmt: skip
MOST = 2e-6  # relative, in float32; sums in another order
STEPS = 3
PLAN = espalier.plan(espalier.build([[1, 2], [1, 3]]), token_budget=8)


@dataclass(frozen=True)
class Case:
    """One run of an engine. when: patched "before" or "after" deepspeed.initialize, or the "engine", or a module "around" it; zero:
    more of its config."""

    stage: int
    kind: str = "qwen3"
    when: str = "before"
    dtype: torch.dtype = torch.float32
    lora: bool = False
    checkpointing: bool = False
    accumulate: int = 1
    from_init: bool = False
    offload: bool = False
    compiled: bool = False
    zero: tuple = ()
    config: tuple = ()


def config_of(case):
    zero = {"stage": case.stage, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1000,
            "stage3_prefetch_bucket_size": 1000, "reduce_bucket_size": 20000, "overlap_comm": False} | dict(case.zero)  # fmt: skip
    if case.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        zero |= {"offload_param": {"device": "cpu"}} if case.stage == 3 else {}
    return {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": case.accumulate, "zero_optimization": zero,
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 1.0,
            "steps_per_print": 10**9, "bf16": {"enabled": case.dtype == torch.bfloat16}} | dict(case.config)  # fmt: skip


def model_of(case):
    kind = "qwen3" if case.kind == "tied" else case.kind
    config = AutoConfig.for_model(**MODEL | {"model_type": kind} | KINDS[case.kind])
    config._experts_implementation = "eager"
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=config_of(case)) if case.from_init else contextlib.nullcontext():
        model = AutoModelForCausalLM.from_config(config).train()
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if case.lora:
        adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapter)
    return model


class Actor(torch.nn.Module):
    """As OpenRLHF's, of which the engine is all."""

    def __init__(self, model):
        super().__init__()
        self.model = model


def engine_of(case, is_patched):
    model = model_of(case)
    if is_patched and case.when == "before":
        patch(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3) if case.offload else torch.optim.SGD(trained, lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(case))
    if is_patched and case.when != "before":
        around = Actor(engine)
        patch({"after": engine.module, "engine": engine, "around": around}[case.when])
        assert sharing(around) == sharing(engine)
    if case.compiled:
        engine.compile(backend="eager")
    return engine


def batches(case, rank):
    """Of ranks whose rows share differently: those of rank 1 have no prefix in common."""
    generator = torch.Generator().manual_seed(5 + rank.rank)
    for _ in range(STEPS * case.accumulate):
        trunk = torch.randint(1, VOCABULARY, (1 if rank.rank == 0 else 4, 6), generator=generator).expand(4, -1)
        yield torch.cat([trunk, torch.randint(1, VOCABULARY, (4, 4), generator=generator)], 1)


def results(case, rank, is_patched):
    """(losses, gradient norms, sums of parameters), and what is generated, of some steps and an evaluation. Stage 0 says no norms
    in float32."""
    engine = engine_of(case, is_patched)
    losses, norms, sums = [], [], []
    for ids in batches(case, rank):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm()
        losses.append(loss.item())
        norms += [] if norm is None else [float(norm)]
    engine.eval()
    with torch.no_grad():
        losses.append(engine(input_ids=ids, labels=ids).loss.item())
        tokens = engine.module.generate(ids[:1], max_new_tokens=3, do_sample=False, pad_token_id=0, synced_gpus=case.stage == 3)
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter]) if case.stage == 3 else contextlib.nullcontext():
            sums.append(parameter.detach().double().abs().sum().item())
    if is_patched:
        assert rank.rank or sharing(engine.module).ratio > 1.3
    engine.destroy()
    return (losses, norms, sums), tokens.tolist()


def compare(case, rank):
    """In bfloat16 the errors of both against float32."""
    theirs, ours = results(case, rank, False), results(case, rank, True)
    if case.dtype == torch.float32:
        for mine, other in zip(ours[0], theirs[0], strict=True):
            assert mine == pytest.approx(other, rel=MOST), case
        assert ours[1] == theirs[1], case
        return
    exact = results(replace(case, dtype=torch.float32), rank, False)
    for mine, other, right in zip(ours[0], theirs[0], exact[0], strict=True):
        if not right:
            continue
        patched, unpatched = apart(mine, right), apart(other, right)
        assert error_ratio(patched, unpatched, torch.finfo(case.dtype).eps / 2) <= MAX_RATIO, (case, patched, unpatched)


def apart(ours, theirs):
    """The relative error of figures, root mean square."""
    pairs = torch.tensor([ours, theirs], dtype=torch.float64)
    return (pairs[0] / pairs[1] - 1).square().mean().sqrt().item()


def whole_table(stage):
    """Every option alone and some together, patched at every moment."""
    base = Case(stage)
    cases = [replace(base, when=when) for when in ("before", "after", "engine", "around")]
    cases += [replace(base, kind=kind) for kind in KINDS if kind != "qwen3"]
    cases += [replace(base, dtype=torch.bfloat16), replace(base, checkpointing=True), replace(base, lora=True),
              replace(base, lora=True, checkpointing=True), replace(base, accumulate=2),
              replace(base, lora=True, dtype=torch.bfloat16, checkpointing=True, when="engine"),
              replace(base, compiled=True), replace(base, compiled=True, when="after", accumulate=2)]  # fmt: skip
    if stage >= 2:
        cases += [replace(base, offload=True), replace(base, offload=True, lora=True, checkpointing=True)]
        cases.append(replace(base, zero=(("overlap_comm", True),)))
    if stage == 3:
        cases += [replace(base, from_init=True, kind=kind) for kind in ("qwen3", "tied")]  # qwen3_moe fails there unpatched
        cases.append(replace(base, zero=(("zero_hpz_partition_size", 2),)))
    return cases


SHORT = {
    0: [Case(0, when="engine", accumulate=2)],
    1: [Case(1, when="after", dtype=torch.bfloat16), Case(1, lora=True, checkpointing=True)],
    2: [Case(2, kind="qwen3_moe", accumulate=2, when="around"), Case(2, when="engine", offload=True)],
    3: [Case(3), Case(3, kind="qwen3_moe"), Case(3, when="engine", lora=True, checkpointing=True),
        Case(3, from_init=True, kind="tied"), Case(3, kind="qwen3_5_text"), Case(3, kind="stablelm", when="after"),
        Case(3, zero=(("zero_hpz_partition_size", 2),))],
}  # fmt: skip


def steps_of_stage(stage):
    def check(rank):
        for case in whole_table(stage) if os.environ.get("ESPALIER_DEEPSPEED") == "all" else SHORT[stage]:
            compare(case, rank)

    check.__name__ = f"steps_of_stage_{stage}"
    return check


@contextlib.contextmanager
def another_forest():
    """Tokens of patched models see other branches."""
    stock = patching.TreeRun.__init__

    def init(run, *arguments):
        stock(run, *arguments)
        run.subtree_end = torch.full_like(run.subtree_end, run.num_tokens)

    with mock.patch.object(patching.TreeRun, "__init__", init):
        yield


def another_forest_is_seen(rank):
    """The negative control."""
    theirs = results(Case(3), rank, False)
    with another_forest():
        ours = results(Case(3), rank, True)
    assert ours[0][0] != pytest.approx(theirs[0][0], rel=1e-4)


class Rows(TorchDispatchMode):
    """Counts rows of logits, and of hidden states of which log-probabilities are computed without logits."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if str(function) in ("aten.mm.default", "aten.addmm.default") and output.shape[-1] == VOCABULARY:
            self.count += len(output)
        if str(function) == "espalier.edge_logprobs.default":
            self.count += len(args[0])
        return output


def heads_are_shared(rank):
    """The head computes the distinct tokens that have a label: 3 of a trunk of 6 and its last, and those of four branches."""
    for stage in range(4):
        for is_patched, count in ((False, 40), (True, 6 + 4 * 3 if rank.rank == 0 else 36)):
            engine = engine_of(Case(stage), is_patched)
            ids = next(batches(Case(stage), rank))
            with Rows() as rows:
                engine(input_ids=ids, labels=ids)
            assert rows.count == count, (stage, is_patched, rows.count)
            engine.destroy()


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def logits_are_those_of_the_forward_pass(rank):
    """Before a step of the optimizer and after it, or refused there, on each rank."""
    for stage in range(4):
        theirs, ours = engine_of(Case(stage), False), engine_of(Case(stage), True)
        ids = next(batches(Case(stage), rank))
        expected, output = (engine(input_ids=ids, labels=ids) for engine in (theirs, ours))
        late = ours(input_ids=ids, labels=ids)
        assert_close(output.logits, expected.logits)
        ours.backward(output.loss)
        ours.step()
        try:
            assert_close(late.logits, expected.logits)
        except Unsupported as refusal:
            assert stage > 0 and "has changed since the forward pass" in str(refusal)
        with pytest.raises(AssertionError):
            assert_close(ours(input_ids=ids, labels=ids).logits, expected.logits)
        theirs.destroy()
        ours.destroy()


def what_cannot_be_done_is_refused(rank):
    for stage in range(4):
        engine = engine_of(Case(stage), True)
        with pytest.raises(Unsupported, match="espalier.Step: expected a model whose gradients are those of PyTorch, received a D"):
            espalier.Step(engine, PLAN)
        if stage:
            with pytest.raises(Unsupported, match="received one that DeepSpeed has taken over"):
                espalier.Step(engine.module, PLAN)
        batch = {"input_ids": next(batches(Case(stage), rank))}
        if stage < 3:
            assert verify(engine, batch).passed
        else:
            with pytest.raises(Unsupported, match="espalier.hf.verify: .*received one whose parameters ZeRO 3 of DeepSpeed has"):
                verify(engine, batch)
        engine.destroy()


def tensor_parallel_heads(rank):
    """AutoTP, whose ranks take the same rows."""
    same = replace(rank, rank=0)
    compare(Case(1, config=(("tensor_parallel", {"autotp_size": 2}),)), same)


def ulysses_is_refused(rank):
    """It divides rows over ranks in an attention function of its own."""
    model = model_of(Case(0))
    functions = __import__("transformers").modeling_utils.ALL_ATTENTION_FUNCTIONS
    before = dict(functions._global_mapping)
    try:
        UlyssesSPAttentionHF.register_with_transformers(model, core_attn_implementation="sdpa", sequence_parallel_size=2,
                                                        micro_batch_size=4, seq_length=10, seq_length_is_variable=True)  # fmt: skip
        with pytest.raises(Unsupported, match="received the attention function 'sdpa' from .*deepspeed"):
            patch(model)(input_ids=next(batches(Case(0), rank)))
    finally:
        functions._global_mapping.clear()
        functions._global_mapping.update(before)


def deepcompile_is_refused(rank):
    """Its backend, which needs GPUs and NCCL, is a stand-in that leaves graphs as they are."""
    ids = next(batches(Case(0), rank))
    for stage in (1, 2, 3):
        engine = engine_of(Case(stage, config=(("compile", {"deepcompile": True}),)), True)
        engine(input_ids=ids, labels=ids)  # not compiled yet
        with mock.patch.object(engine, "get_deepspeed_compile_backend", lambda *_: ("eager", None)):
            engine.compile()
        assert engine.is_deepcompile_active()
        with pytest.raises(Unsupported, match="DeepCompile of DeepSpeed: it is not known to be exact"):
            engine(input_ids=ids, labels=ids)
        engine.destroy()


def set_up(rank):
    os.environ |= {"RANK": str(rank.rank), "LOCAL_RANK": str(rank.rank), "WORLD_SIZE": str(rank.size)}
    deepspeed.init_distributed("gloo", verbose=False, dist_init_required=False)
    assert dist.get_world_size() == rank.size


# The last two change DeepSpeed and Transformers for the rest of a process.
CHECKS = {2: [set_up, *map(steps_of_stage, range(4)), another_forest_is_seen, heads_are_shared,
              logits_are_those_of_the_forward_pass, what_cannot_be_done_is_refused, deepcompile_is_refused,
              tensor_parallel_heads, ulysses_is_refused]}  # fmt: skip

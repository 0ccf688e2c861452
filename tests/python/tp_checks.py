# SPDX-License-Identifier: Apache-2.0
"""What is checked on several ranks over which Transformers has divided heads, vocabulary and experts: losses and gradients against
those of one process, each row alone, and that what is broken on purpose is not exact."""

import functools
import itertools
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import espalier
from conftest import seed_of
from cp_checks import EXACT, IS_LONG, WHOLE, summed
from cp_shapes import SHAPES
from espalier.distributed import Ranks
from espalier.hf import patch, tensor_parallel, unpatch, verify
from espalier.hf.float64 import InFloat64
from hf_models import alone, branching_rows, make_model, padded
from rank_checks import clear, refused

# Four heads of keys, so that four ranks have some; a vocabulary of 61 is not divided evenly, which FSDP2 needs where it is tied.
CHANGES = {kind: {"num_key_value_heads": 4, **({"vocab_size": 64} if kind in ("qwen3_moe", "granitemoehybrid") else {})}
           for kind in ("qwen3", "gpt_oss", "qwen3_moe", "qwen3_5", "granitemoehybrid")}  # fmt: skip
OTHERS = {"qwen3_next": {"vocab_size": 64}, "glm4_moe": {}}


def plain(kind, dtype=torch.float64):
    return make_model(kind, dtype, **(CHANGES | OTHERS)[kind])


@functools.cache
def folder_of(kind):
    """Of the model, by rank 0 for all."""
    found = [None]
    if dist.get_rank() == 0:
        found = [tempfile.mkdtemp()]
        plain(kind).save_pretrained(found[0])
    dist.broadcast_object_list(found)
    return Path(found[0])


@functools.cache
def expected(kind, shape):
    """By rank 0 for all."""
    found = [alone(plain(kind), SHAPES[shape]()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def parallel(kind, tensor, shards=1, dtype=torch.float64, **options):
    """The model of plain(kind) as Transformers divides it over `tensor` ranks, and FSDP2 over `shards`."""
    config = DistributedConfig(tp_size=tensor, fsdp_size=shards, **options)
    model = AutoModelForCausalLM.from_pretrained(folder_of(kind), dtype=dtype, distributed_config=config,
                                                 experts_implementation="eager").train()  # fmt: skip
    return model.double() if dtype == torch.float64 else model  # since Transformers 5.24 some routers are in float32


def mesh_of(data, context, tensor):
    return dist.init_device_mesh("cpu", (data, context, tensor), mesh_dim_names=("dp", "cp", "tp"))


def error_of(loss, model, theirs):
    """As hf_models.worst_error, of this rank's parts of gradients."""
    other_loss, others = theirs
    everything = torch.stack([gradient.norm() for gradient in others.values() if gradient is not None]).norm()
    errors = [abs(loss - other_loss) / abs(other_loss)]
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert found.keys() == others.keys(), found.keys() ^ others.keys()
    for name, gradient in others.items():
        own = found[name].grad
        assert (own is None) == (gradient is None), name
        if gradient is not None:
            least = max(gradient.norm(), 1e-2 * everything)
            if isinstance(own, DTensor):
                gradient = distribute_tensor(gradient, own.device_mesh, own.placements, src_data_rank=None).to_local()
                own = own.to_local()
            errors.append(((own - gradient).norm() / least).item())
    return max(errors)


def loss_of(ranks, model, rows, budget=WHOLE, dtype_of_sums=InFloat64, **options):
    """A step on rows; returns its sum of losses over the ranks."""
    share = ranks.share(rows)
    plan = espalier.plan(share.forest, token_budget=budget, strategy="tree-packing" if budget == WHOLE else "partition")
    return summed(ranks, espalier.Step(model, plan, **options), share, dtype_of_sums)[0]


def topologies(size):
    return [found for found in itertools.product((1, 2, 4), repeat=3) if found[0] * found[1] * found[2] == size]


def check_topologies(rank):
    """Data, context and tensor parallelism in every product; each family with every shape, whole and in partitions, in the long
    form, else in turn, and every second family on four ranks."""
    meshes = {dimensions: mesh_of(*dimensions) for dimensions in topologies(rank.size)}
    cases = list(itertools.product(meshes, CHANGES))[:: 2 if rank.size == 4 and not IS_LONG else 1]
    for number, (dimensions, kind) in enumerate(cases):
        data, context, tensor = dimensions
        shapes = [shape for place, shape in enumerate(SHAPES) if IS_LONG or (place + number) % len(SHAPES) == 0]
        budgets = [(WHOLE, False), (7, number % 4 < 2)]
        model = patch(parallel(kind, tensor, data * context))
        ranks = Ranks(model, meshes[dimensions])
        for shape, (budget, recompute) in itertools.product(shapes, budgets if IS_LONG else [budgets[number % 2]]):
            clear(model)
            loss = loss_of(ranks, model, SHAPES[shape](), budget, recompute=recompute)
            error = error_of(loss, model, expected(kind, shape))
            assert error <= EXACT, (dimensions, kind, shape, budget, error, f"seed {seed_of(0)}")
        ranks.close()


def entropies(rank):
    """Log-probabilities and entropies at a temperature, with loss weights, by parts of the vocabulary."""
    rows, found = branching_rows(), []
    for kind in "qwen3", "granitemoehybrid":
        for model in patch(plain(kind)), patch(parallel(kind, rank.size)):
            run = espalier.Step(model, espalier.plan(espalier.build(rows), token_budget=WHOLE))
            with InFloat64():
                for batch in run:
                    logprobs, entropy = run.logprobs(batch, temperature=0.7, entropy=True)
                    weights = torch.arange(len(logprobs)) % 7 / 3
                    loss = (entropy * (2 - weights) - weights * logprobs).sum()
                    run.backward(loss)
            found.append((loss.item(), {name: of.grad for name, of in model.named_parameters()}, logprobs, entropy))
        ours, theirs = found.pop(), found.pop()
        assert error_of(ours[0], model, theirs[:2]) <= EXACT
        assert all((a - b).abs().max() <= EXACT for a, b in zip(ours[2:], theirs[2:]))


def low_precision(rank):
    """bfloat16: errors beside those of Transformers' own, which rounds logits, and of one process."""
    rows = SHAPES["deep"]()
    for kind in "qwen3", "gpt_oss":
        exact = expected(kind, "deep")[1]
        errors = []
        for model in parallel(kind, rank.size, dtype=torch.bfloat16), plain(kind, torch.bfloat16):
            run = espalier.Step(patch(model), espalier.plan(espalier.build(rows), token_budget=9, strategy="partition"))
            for batch in run:
                run.backward(-run.logprobs(batch).sum())
            error = 0
            for name, parameter in model.named_parameters():
                own, theirs = parameter.grad, exact[name]
                if isinstance(own, DTensor):
                    theirs = distribute_tensor(theirs, own.device_mesh, own.placements, src_data_rank=None).to_local()
                    own = own.to_local()
                error += ((own.double() - theirs).norm() / exact[name].norm()) ** 2
            total = torch.tensor([error])
            dist.all_reduce(total)
            errors.append(total.item())
        assert errors[0] <= 4 * errors[1], errors


def calls_of_the_model(rank):
    """Batches without espalier.Step, with and after a patch, and two backward passes between two updates."""
    rows = branching_rows()
    for kind in "qwen3", "glm4_moe":  # whose plan leaves out the norms of heads
        theirs, model = alone(plain(kind), rows), parallel(kind, rank.size)
        batch = padded(rows)
        for is_patched in (False, True, False) if kind == "qwen3" else (True,):
            (patch if is_patched else unpatch)(model)
            for passes in (1, 2) if is_patched else (1,):
                clear(model)
                with InFloat64():
                    for _ in range(passes):
                        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
                        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
                        (loss / passes).backward()
                assert error_of(loss.item(), model, theirs) <= EXACT


def generation(rank):
    """Tokens that a patched model generates are those of one process."""
    prompt, found = torch.tensor([[5, 6, 7, 8]]), []
    for model in plain("qwen3"), patch(parallel("qwen3", rank.size)):
        found.append(model.eval().generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist())
    assert found[0] == found[1]


def experts(rank):
    """Experts over ranks, as Transformers does it: by heads' ranks, and over more of them."""
    for kind, tensor, mode in ("qwen3_next", 2, "gathered"), ("glm4_moe", 1, "gathered"), ("glm4_moe", 1, "zero3"):
        is_data = mode == "zero3"  # other rows on the ranks of the experts: these run equally many micro-batches
        others = rank.size // tensor
        model = patch(parallel(kind, tensor, others, ep_size=2))
        ranks = Ranks(model, mesh_of(others if is_data else 1, 1 if is_data else others, tensor), mode=mode)
        rows = SHAPES["deep"]()
        for _ in range(2):  # watched, and not
            clear(model)
            share = ranks.share(rows)
            run = espalier.Step(model, espalier.plan(share.forest, token_budget=45, strategy="tree-packing"))
            loss, _ = summed(ranks, run, share)
            assert error_of(loss, model, expected(kind, "deep")) <= EXACT


def lora(rank):
    """On projections whose outputs are divided: PEFT 0.21 fails at the others under PyTorch 2.11, without a patch as well."""
    import peft

    settings = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)

    rows, whole = SHAPES["star"](), peft.get_peft_model(plain("qwen3"), settings).to(torch.float64)
    model = peft.get_peft_model(parallel("qwen3", rank.size), settings).to(torch.float64)
    for ours, given in zip(model.parameters(), whole.parameters()):
        dist.broadcast(given.data, 0)
        ours.data.copy_(distribute_tensor(given.data, ours.device_mesh, ours.placements) if isinstance(ours, DTensor) else given)
    theirs = alone(whole, rows)
    loss = loss_of(Ranks(patch(model), mesh_of(1, 1, rank.size)), model, rows, 7)
    assert error_of(loss, model, theirs) <= EXACT


def checkpoints(rank):
    """Layers are computed again in backward, where InFloat64 does not reach: beside the same without."""
    for kind in "gpt_oss", "qwen3":
        found = []
        for has_checkpoints in False, True:
            model = patch(parallel(kind, rank.size))
            if has_checkpoints:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            loss = loss_of(Ranks(model), model, SHAPES["deep"](), 9, torch.enable_grad)
            found.append((loss, [parameter.grad for parameter in model.parameters()]))
        assert abs(found[0][0] - found[1][0]) <= EXACT * found[0][0]
        for with_checkpoints, without in zip(*(of for _, of in found)):
            ours, theirs = (each.to_local() if isinstance(each, DTensor) else each for each in (with_checkpoints, without))
            assert (ours - theirs).norm() <= EXACT * theirs.norm() + 1e-14


def zero3(rank):
    """Layers gather their parts of parameters for themselves."""
    for shape in "deep", "chain":
        model = patch(parallel("qwen3", 2, rank.size // 2))
        ranks = Ranks(model, mode="zero3")  # by the mesh of Transformers
        assert (ranks.dimensions.data_size, ranks.dimensions.tensor_size) == (rank.size // 2, 2)
        for _ in range(2):  # watched, and not
            clear(model)
            share = ranks.share(SHAPES[shape]())
            run = espalier.Step(model, espalier.plan(share.forest, token_budget=45, strategy="tree-packing"))
            loss, _ = summed(ranks, run, share)
            assert error_of(loss, model, expected("qwen3", shape)) <= EXACT


def what_is_broken(rank):
    """Negative controls: each gives other losses or gradients."""
    model = patch(parallel("qwen3", rank.size))
    ranks = Ranks(model)

    def error():
        clear(model)
        loss = loss_of(ranks, model, SHAPES["deep"](), 9)
        return error_of(loss, model, expected("qwen3", "deep"))

    def largest(found):
        found = torch.tensor([found])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    assert error() <= EXACT
    without = lambda gradient: staticmethod(lambda _ctx, given: (gradient(given), None))
    with mock.patch.object(tensor_parallel._Spread, "backward", without(lambda given: given)):  # parts of gradients
        assert largest(error()) > 1e-4
    with mock.patch.object(tensor_parallel._Sum, "backward", without(lambda given: rank.size * given)):
        assert largest(error()) > 1e-4
    first = tensor_parallel.VocabularyPart.__init__

    def shifted(self, head):
        first(self, head)
        self.begin = max(self.begin - 1, 0)

    with mock.patch.object(tensor_parallel.VocabularyPart, "__init__", shifted):
        assert largest(error()) > 1e-4
    tensor_parallel.detach(model)  # Transformers sums a norm's gradient with all that was there before
    assert largest(error()) > 1e-4
    tensor_parallel.attach(model)
    assert error() <= EXACT


def what_is_refused(rank):
    model = patch(parallel("qwen3", rank.size))
    refused(lambda: Ranks(model, mesh_of(rank.size, 1, 1)), "expected a dimension tp over the ranks [0, 1", "tp_size")
    single = patch(make_model("qwen3"))
    for module in single.model.layers, [single]:
        for each in module:
            fully_shard(each, mesh=dist.init_device_mesh("cpu", (rank.size,)))
    refused(lambda: Ranks(single, mesh_of(1, 1, rank.size)), "expected a dimension tp over the ranks", "received one over [0, 1")
    refused(lambda: Ranks(patch(parallel("glm4_moe", 1, rank.size, ep_size=rank.size))), 'take mode="zero3"', "experts")
    for call in lambda: verify(model, padded(branching_rows())), lambda: patch(model, check=True):
        refused(call, "expected a model that one process has whole", "tp_size")
    narrow = parallel("qwen3", rank.size)
    narrow.config.num_key_value_heads = 1
    refused(lambda: patch(narrow), "num_key_value_heads", f"{rank.size} ranks")
    ranks = Ranks(model)
    rows = SHAPES["star"]()
    share = ranks.share(rows)
    mask = [[1] * (len(row) - (rank.rank > 0)) + [0] * (rank.rank > 0) for row in rows]
    other = espalier.Step(model, espalier.plan(share.forest, token_budget=WHOLE), loss_mask=mask)
    refused(ranks.step(share, other).__enter__, "division: expected the same", "cp or tp group")
    other = espalier.Step(model, espalier.plan(share.forest, token_budget=9 if rank.rank else WHOLE, strategy="partition"))
    refused(ranks.step(None, other).__enter__, "expected the same on all ranks")
    loss = loss_of(ranks, model, rows)
    assert error_of(loss, model, expected("qwen3", "star")) <= EXACT


CHECKS = {2: [check_topologies, entropies, low_precision, calls_of_the_model, generation, lora, checkpoints, what_is_broken, what_is_refused],
          4: [check_topologies, experts, zero3, entropies]}  # fmt: skip

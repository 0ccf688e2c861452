# SPDX-License-Identifier: Apache-2.0
"""Small trainers of trl.experimental, each as a function of (model, tokenizer, settings). Where one needs a server of vLLM, an
object stands for the server, and what runs in the trainer's own process is TRL's."""

import copy
import importlib
import queue
import types
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from hf_models import make_model

PROMPT = "w3 w1 w4 w1 w5 w9 w2 w6 w5"
ANSWERS = ["w0 w1", "w7 w8 w9", "w14 w15 w16 w17", "w21 w22"]
TALK = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def named(path):
    """What stands there in trl.experimental, such as gkd.GKDConfig."""
    home, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"trl.experimental.{home}"), name)


def dataset(rows):
    import datasets

    return datasets.Dataset.from_list(rows)


def prompts(**columns):
    return dataset([{"prompt": PROMPT, **columns}] * 4)


def talks(words):
    """(rows of messages, the tokenizer with a template for them)."""
    words = copy.deepcopy(words)
    words.chat_template = TALK
    rows = [[("user", PROMPT), ("assistant", answer)] for answer in ANSWERS]
    return dataset([{"messages": [{"role": role, "content": said} for role, said in row]} for row in rows]), words


def saved(model, words, settings, name="saved"):
    """The model, after it was written with its tokenizer to a folder, which its config names: for what TRL loads again."""
    folder = Path(settings["output_dir"]) / name
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    model.config._name_or_path = str(folder)
    return model


def teacher():
    return make_model("qwen3", seed=4)


def lengths(completions, **_):
    return [float(len(completion)) for completion in completions]


def online_dpo(model, words, settings):
    args = named("online_dpo.OnlineDPOConfig")(**settings, max_new_tokens=6)
    return named("online_dpo.OnlineDPOTrainer")(model, teacher(), lengths, args=args, train_dataset=prompts(),
                                                processing_class=words)  # fmt: skip


def a2po(model, words, settings):
    args = named("a2po.A2POConfig")(**settings, max_completion_length=6, num_value_samples=3, beta2=1.0,
                                    filter_all_incorrect=False)  # fmt: skip
    is_even = lambda completions, **_: [float(len(completion) % 2 == 0) for completion in completions]
    return named("a2po.A2POTrainer")(model, is_even, args=args, train_dataset=prompts(), processing_class=words)


def gkd(share_of_own):
    """share_of_own: of batches whose answers the student samples, 0 or 1."""

    def make(model, words, settings):
        rows, words = talks(words)
        args = named("gkd.GKDConfig")(**settings, lmbda=share_of_own, max_new_tokens=6)
        return named("gkd.GKDTrainer")(model, teacher(), args=args, train_dataset=rows, processing_class=words)

    return make


def gold(share_of_own, **more):
    def make(model, words, settings):
        rows, words = talks(words)
        args = named("gold.GOLDConfig")(**settings, lmbda=share_of_own, max_completion_length=6, max_length=64,
                                        use_extended_uld=False, **more)  # fmt: skip
        other = saved(teacher(), words, settings, "teacher")
        return named("gold.GOLDTrainer")(model, other, args=args, train_dataset=rows, processing_class=words)

    return make


def iw_opd(share_of_own, **more):
    def make(model, words, settings):
        rows, words = talks(words)
        args = named("iw_opd.IWOPDConfig")(**settings, lmbda=share_of_own, max_completion_length=6, max_length=64, **more)
        other = saved(teacher(), words, settings, "teacher")
        return named("iw_opd.IWOPDTrainer")(model, other, args=args, train_dataset=rows, processing_class=words)

    return make


def sdft(model, words, settings):
    args = named("sdft.SDFTConfig")(**settings, num_generations=4, max_completion_length=6, distillation_topk=5)
    rows = prompts(privileged_context="w11 w12 w13")
    return named("sdft.SDFTTrainer")(saved(model, words, settings), args, rows, processing_class=words)


def sdpo(**more):
    def make(model, words, settings):
        args = named("sdpo.SDPOConfig")(**settings, num_generations=4, max_completion_length=6, success_reward_threshold=4.0,
                                        **more)  # fmt: skip
        return named("sdpo.SDPOTrainer")(saved(model, words, settings), lengths, args, prompts(), processing_class=words)

    return make


def bema_dpo(model, words, settings):
    import trl

    rows = dataset([{"prompt": PROMPT + " ", "chosen": answer, "rejected": "w8 w8"} for answer in ANSWERS])
    return named("bema_for_ref_model.DPOTrainer")(model, teacher(), args=trl.DPOConfig(**settings), train_dataset=rows,
                                                  processing_class=words,
                                                  callbacks=[named("bema_for_ref_model.BEMACallback")()])  # fmt: skip


class Server:
    """Stands for a server of vLLM that has a teacher."""

    def __init__(self, **_):
        self.teacher = teacher().eval()

    @torch.no_grad()
    def get_sequence_logprobs(self, sequences, prompt_lengths, top_logprobs, temperature):
        found = {"logprobs": [], "logprob_token_ids": [], "actual_logprobs": []}
        for tokens, begin in zip(sequences, prompt_lengths, strict=True):
            logits = self.teacher(input_ids=torch.tensor([tokens])).logits[0, begin - 1:-1] / temperature
            logprobs = logits.log_softmax(-1)
            top = logprobs.topk(top_logprobs)
            found["logprobs"].append(top.values.tolist())
            found["logprob_token_ids"].append(top.indices.tolist())
            found["actual_logprobs"].append(logprobs.gather(1, torch.tensor(tokens[begin:]).unsqueeze(1)).tolist())
        return found


def server_distillation(model, words, settings):
    args = named("server_distillation.ServerDistillationConfig")(
        **settings, max_completion_length=6, teacher_model_server_url="http://localhost:1")  # fmt: skip
    with mock.patch("trl.generation.vllm_client.VLLMClient", Server):
        return named("server_distillation.ServerDistillationTrainer")(model, args, prompts(), processing_class=words)


class Rollouts:
    """Stands for the process that samples from a server of vLLM: has sampled already."""

    def __init__(self, samples):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(types.SimpleNamespace(**sample, model_version=0, enqueued_at=None, metrics={}))

    def check_health(self, _stale_after_s):
        raise AssertionError("expected no more samples to be asked for")

    def __getattr__(self, name):
        if name in ("start", "stop", "update_model_version"):
            return lambda *_, **__: None
        raise AttributeError(name)


class Transfer:
    """Stands for what sends weights to a server of vLLM."""

    def __getattr__(self, name):
        if name in ("init_weight_transfer", "pause", "send_weights", "resume", "destroy"):
            return lambda *_, **__: None
        raise AttributeError(name)


def without_gpu():
    """Inside, there is a name of a GPU, whose FLOPs the trainers ask for."""
    return mock.patch("torch.cuda.get_device_name", lambda *_: "none")


def async_distillation(model, words, settings):
    rng, samples = np.random.default_rng(7), []
    for number, answer in enumerate(ANSWERS):
        ids = np.array(words(f"{PROMPT} {answer}")["input_ids"])
        mask = np.arange(len(ids)) >= len(PROMPT.split())
        candidates = np.stack([rng.permutation(59)[:3] for _ in ids])
        samples.append(dict(input_ids=ids, completion_mask=mask.astype(np.int64), teacher_id="default", prompt_id=number,
                            teacher_topk_ids=candidates, teacher_topk_logprobs=-rng.uniform(2, 4, candidates.shape)))  # fmt: skip
    args = named("async_distillation.AsyncDistillationConfig")(
        **settings, dtype="float64", token_budget=0, model_init_kwargs={"attn_implementation": "sdpa"})  # fmt: skip
    folder = saved(model, words, settings).config._name_or_path
    with without_gpu():
        return named("async_distillation.AsyncDistillationTrainer")(
            folder, args, prompts(), words, rollout_worker=Rollouts(3 * samples), weight_transfer=Transfer())  # fmt: skip


def async_grpo(model, words, settings):
    args = named("async_grpo.AsyncGRPOConfig")(**settings, token_budget=0)
    folder = saved(model, words, settings).config._name_or_path
    with without_gpu():
        return named("async_grpo.AsyncGRPOTrainer")(folder, lengths, args, prompts(), words, rollout_worker=Rollouts([]),
                                                    weight_transfer=Transfer())  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""The requests that are JSON, with the fields that the server reads. Others are ignored, as newer clients may send them."""

from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field


class Request(BaseModel):
    """Of all requests."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False)


class CreateSession(Request):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    sdk_version: str = ""


class OfSession(Request):
    session_id: str


class OfModel(Request):
    model_id: str


class Lora(Request):
    rank: int = Field(ge=1, le=4096)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Request):
    type: str = "adamw"


class CreateModel(Request):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()
    user_metadata: dict[str, Any] | None = None


class Adam(Request):
    learning_rate: float = Field(1e-4, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0)
    type: Literal["adamw"] = "adamw"


class OptimStep(Request):
    model_id: str
    seq_id: int
    optim_params: Adam = Field(validation_alias=AliasChoices("adam_params", "optimizer_params", "optim_params"))


class SaveWeights(Request):
    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(SaveWeights):
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadWeights(Request):
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    path: str
    optimizer: bool
    optimizer_config: Optimizer | None = None
    user_metadata: dict[str, Any] | None = None


class CreateSamplingSession(Request):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class OfSamplingSession(Request):
    sampling_session_id: str


class PromptChunk(Request):
    type: str = "encoded_text"
    tokens: list[int] = []


class Prompt(Request):
    chunks: list[PromptChunk]


class SamplingParams(Request):
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = -1
    top_p: float = Field(1.0, gt=0, le=1)


class JsonTensor(Request):
    data: list[int] | list[float]
    dtype: Literal["float32", "int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Sample(Request):
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: int = Field(1, ge=1, le=4096)
    sampling_session_id: str | None = None
    seq_id: int | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0)
    topk_sample_logprobs: int = Field(0, ge=0)
    target_prompt_logprobs: JsonTensor | None = None
    prompt_alt_tokens_k: int = Field(0, ge=0)
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    record_stability_info: bool | None = None


class RetrieveFuture(Request):
    request_id: str
    allow_metadata_only: bool = False


class FuturesTarget(Request):
    sampling_session_id: str
    cloned_sampler_id: int = 0


class RetrieveFutures(Request):
    target: FuturesTarget
    prev_cursor: int = Field(0, ge=0)
    timeout: float | None = None


class CancelFuture(Request):
    request_id: str


class OfCheckpoint(Request):
    tinker_path: str


class CopyWeights(Request):
    session_id: str | None = None
    model_seq_id: int | None = None
    source_path: str
    ttl_seconds: int | None = None


class TimeToLive(Request):
    ttl_seconds: int | None = Field(None, ge=1)

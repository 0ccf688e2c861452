# SPDX-License-Identifier: Apache-2.0
"""The requests that are JSON, with the fields that the server reads. Others are ignored, as newer clients may send them."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from .index import json_bytes, utc

MAX_STOPS = 64         # strings or ids that end a sample
STOP_CHARACTERS = 512  # of a stop string

Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
SeqId = Annotated[int, Field(ge=0, lt=1 << 62)]
Number = Annotated[int, Field(ge=0, lt=10**9)]           # of a model or sampler of a session
RUN_METADATA_BYTES = 8 << 20       # as JSON
CHECKPOINT_METADATA_BYTES = 4096  # which lists repeat


def _at_most(limit: int) -> AfterValidator:
    def check(value: dict[str, Any]) -> dict[str, Any]:
        if (size := json_bytes(value)) > limit:
            raise PydanticCustomError("metadata", "expected at most {limit} bytes as JSON, received {size}",
                                      {"limit": limit, "size": size})  # fmt: skip
        return value

    return AfterValidator(check)


RunMetadata = Annotated[dict[str, Any], _at_most(RUN_METADATA_BYTES)]
CheckpointMetadata = Annotated[dict[str, str], _at_most(CHECKPOINT_METADATA_BYTES)]
Seconds = Annotated[int, Field(ge=1, le=10 * 366 * 86400)]  # until a checkpoint expires


class Request(BaseModel):
    """Of all requests."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False)


class CreateSession(Request):
    tags: list[str] = []
    display_name: str | None = Field(None, max_length=1000)
    sdk_version: str = ""


class OfSession(Request):
    session_id: str


class OfModel(Request):
    model_id: str


class Turn(Request):
    """What places an operation in the order of its model."""

    model_id: str
    seq_id: SeqId


class Lora(Request):
    rank: int = Field(ge=0, le=4096)
    seed: Int64 | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Request):
    type: str = "adamw"


class CreateModel(Request):
    session_id: str
    model_seq_id: Number
    base_model: str
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()
    user_metadata: RunMetadata | None = None


class Adam(Request):
    learning_rate: float = Field(1e-4, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0)
    type: Literal["adamw"] = "adamw"


class OptimStep(Turn):
    optim_params: Adam = Field(validation_alias=AliasChoices("adam_params", "optimizer_params", "optim_params"))


class SaveWeights(Turn):
    path: str | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: CheckpointMetadata | None = None


class SaveExternal(SaveWeights):
    age_encryption_recipients: list[str] | None = None


class SaveForSampler(SaveWeights):
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadWeights(Request):
    model_id: str | None = None
    seq_id: SeqId | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    path: str
    optimizer: bool
    optimizer_config: Optimizer | None = None
    user_metadata: RunMetadata | None = None


class CreateSamplingSession(Request):
    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class OfSamplingSession(Request):
    sampling_session_id: str


class PromptChunk(Request):
    type: str = "encoded_text"
    tokens: list[Int64] = []


class Prompt(Request):
    chunks: list[PromptChunk]


class SamplingParams(Request):
    max_tokens: int | None = Field(None, ge=1)
    seed: Int64 | None = None
    stop: str | list[str] | list[Token] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1, lt=1 << 31)
    top_p: float = Field(1.0, gt=0, le=1)

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if value is None or (isinstance(stops, list) and len(stops) <= MAX_STOPS and (
                all(isinstance(each, str) and 1 <= len(each) <= STOP_CHARACTERS for each in stops)
                or all(isinstance(each, int) and 0 <= each < 1 << 31 for each in stops))):  # fmt: skip
            return value
        raise ValueError(f"expected at most {MAX_STOPS} strings of 1 to {STOP_CHARACTERS} characters, or as many token ids, "
                         "received something else")  # fmt: skip


class JsonTensor(Request):
    data: list[Int64]
    dtype: Literal["int64"]
    shape: list[Int64] | None = None
    sparse_crow_indices: list[Int64] | None = None
    sparse_col_indices: list[Int64] | None = None


class Sample(Request):
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: int = Field(1, ge=1, le=4096)
    sampling_session_id: str | None = None
    seq_id: SeqId | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0)
    topk_sample_logprobs: int = Field(0, ge=0)
    target_prompt_logprobs: JsonTensor | None = None
    prompt_alt_tokens_k: int = Field(0, ge=0, le=1024)
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
    timeout: float | None = Field(None, ge=0)


class CancelFuture(Request):
    request_id: str


class OfCheckpoint(Request):
    tinker_path: str


class CopyWeights(Request):
    session_id: str | None = None
    model_seq_id: int | None = None
    source_path: str
    ttl_seconds: Seconds | None = None


class StartUpload(Request):
    base_model: str
    lora_config: Lora


class FinishUpload(Request):
    upload_id: str


class SearchCursor(Request):
    last_created_at: Annotated[str, AfterValidator(utc)]
    last_checkpoint_uuid: str


class SearchOwner(Request):
    type: Literal["own", "accessible", "user"] = "own"


class SearchCheckpoints(Request):
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    checkpoint_type: Literal["training", "sampler", "external"] | None = None
    owner: SearchOwner = SearchOwner()
    base_models: list[str] | None = None
    limit: int = Field(50, ge=1, le=200)
    cursor: SearchCursor | None = None


class TimeToLive(Request):
    ttl_seconds: Seconds | None = None

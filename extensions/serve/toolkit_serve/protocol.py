"""Request bodies and errors of the OpenAI API. A field without support is an error, unless its value has no effect."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from toolkit.errors import did_you_mean, one_line

# Values of unsupported fields that ask for nothing; null is always accepted.
_NEUTRAL: dict[str, list[Any]] = {
    "n": [1], "best_of": [1], "echo": [False], "suffix": [""], "presence_penalty": [0], "frequency_penalty": [0],
    "logit_bias": [{}], "tools": [[]], "tool_choice": ["none", "auto"], "functions": [[]],
    "function_call": ["none", "auto"], "parallel_tool_calls": [True, False], "response_format": [{"type": "text"}],
    "tool_calls": [[]], "annotations": [[]], "modalities": [["text"]], "store": [False],
}  # fmt: skip
# Fields that never change an answer.
_IGNORED = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


MAX_STOPS, MAX_STOP_LENGTH = 4, 1024  # OpenAI documents the number
_Alternatives = Annotated[int, Field(ge=0, le=20)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_Ids = Field(min_length=1, fail_fast=True)  # errors of all items of a hostile body would take gigabytes
_Items = Field(min_length=1, max_length=2048, fail_fast=True)


class ApiError(Exception):
    """An error response.

    Args:
        status: HTTP status code.
        message: Shown to the user as one line.
        param: The field of the body with the error.
        code: OpenAI's error code.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        default = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"message": one_line(message), "type": _TYPES.get(status, default), "param": param, "code": code}


class _Fields(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> _Fields:
        for name, value in (self.__pydantic_extra__ or {}).items():
            if value is None or name in _IGNORED or value in _NEUTRAL.get(name, []):
                continue
            hint = did_you_mean(name, type(self).model_fields, 1, cutoff=0.8)
            raise ApiError(400, f"{name}: is not supported{hint or '; remove it'}", name[:200], "unsupported_parameter")
        return self


class StreamOptions(_Fields):
    include_usage: bool | None = None


class Body(_Fields):
    """The fields that both endpoints have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: NonNegativeInt | None = None
    """Not in OpenAI's API, but in other servers'."""
    max_tokens: PositiveInt | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def max_answer(self) -> int | None:
        """Maximum number of tokens of the answer; None: the server's default."""
        return self.max_tokens

    @property
    @abstractmethod
    def n_top(self) -> int | None:
        """Number of alternatives of each token; None: no log-probabilities."""

    @model_validator(mode="after")
    def _check_together(self) -> Body:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: needs stream true", "stream_options")
        return self


class CompletionBody(Body):
    """The body of a request to /v1/completions."""

    prompt: str | Annotated[list[NonNegativeInt], _Ids] | Annotated[list[str], _Ids]
    logprobs: _Alternatives | None = None

    @property
    def n_top(self) -> int | None:
        return self.logprobs


class TextPart(_Fields):
    type: Literal["text"]
    text: str


class Message(_Fields):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], _Items]
    name: str | None = None
    """Has no effect: chat templates do not show names of participants."""

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(Body):
    """The body of a request to /v1/chat/completions."""

    messages: Annotated[list[Message], _Items]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: _Alternatives | None = None

    @property
    def max_answer(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def n_top(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


FIELDS = {name for kind in (CompletionBody, ChatBody, StreamOptions, Message, TextPart) for name in kind.model_fields}
"""Names of the supported fields."""

"""`toolkit serve`: serve a model over HTTP with OpenAI's API."""

import importlib.util
import ipaddress
import os
import re
from typing import Any

from jsonargparse.typing import NonNegativeInt, PositiveInt

from toolkit.commands.inference_options import InferenceOptions
from toolkit.errors import UserError, notice, require_option

KEY = "TOOLKIT_API_KEY"
DEFAULT_LENGTH = 4096
PACKAGES = "'starlette>=0.40' 'pydantic>=2.10' 'uvicorn>=0.30'"


def setup(
    checkpoint_dir: str,
    host: str = "127.0.0.1",
    port: NonNegativeInt = 8000,
    max_concurrent_requests: PositiveInt = 8,
    max_queue: NonNegativeInt = 64,
    max_seq_length: PositiveInt | None = None,
    max_new_tokens: PositiveInt = 512,
    shutdown_timeout: NonNegativeInt = 30,
    prompt_style: str | None = None,
    chat_template: str | None = None,
    shared: InferenceOptions = InferenceOptions(),
) -> None:
    """Serve a model over HTTP with OpenAI's API: chat completions and completions, also streamed.

    Requests are decoded together; each gets what it would get alone. If the environment variable TOOLKIT_API_KEY is
    set, requests need this key. A host that other machines can reach needs a key. Ctrl-C, SIGTERM or SIGHUP ends the
    server.

    Args:
        checkpoint_dir: A checkpoint folder, or a name below checkpoints/; adapters are loaded unmerged.
        host: Address to listen on.
        port: Port to listen on; 0 picks a free one.
        max_concurrent_requests: Maximum number of requests that are decoded together. Memory for their keys and values
            is allocated at the start.
        max_queue: Maximum number of further requests that wait; others are refused with status 429.
        max_seq_length: Maximum number of tokens of prompt and answer. Default: the model's context length, at most
            4096.
        max_new_tokens: Maximum number of tokens of an answer, if the request has no max_tokens.
        shutdown_timeout: Seconds for running requests to finish after Ctrl-C, SIGTERM or SIGHUP; 0 ends them at once.
        prompt_style: Chat template: alpaca, chatml, llama2, llama3, ... Default: the checkpoint's.
        chat_template: Jinja file with a chat template.
        shared: See :class:`InferenceOptions`. Sampling options apply to requests that do not have their own.
    """
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"serve: needs {package}; run: pip install {PACKAGES}")
    hint = f"is not supported with --prompt_style {prompt_style}; remove one of them"
    require_option(chat_template is None or prompt_style is None, "chat_template", chat_template, hint)
    require_option(port < 2**16, "port", port, f"must be at most {2**16 - 1}")
    api_key = os.environ.get(KEY) or None
    hint = f"other machines can reach it; set {KEY} to a key that requests must have"
    require_option(is_loopback(host) or api_key is not None, "host", host, hint)
    sampling = shared.sampling

    from toolkit.inference.load import load_checkpoint
    from toolkit_serve.app import Service, make_app
    from toolkit_serve.batcher import Batcher
    from toolkit_serve.server import open_socket, run_server

    with open_socket(host, port) as listener:
        loaded = load_checkpoint(checkpoint_dir, **shared.loading)
        template = load_template(loaded.tokenizer, prompt_style, chat_template)
        context = loaded.model.config.block_size
        length = max_seq_length or min(context, DEFAULT_LENGTH)
        require_option(length <= context, "max_seq_length", length, f"the model's context length is {context}")
        try:
            batcher = Batcher(loaded.model, max_concurrent_requests, length)
        except RuntimeError as error:  # from the allocation
            need = f"no memory for keys and values of {max_concurrent_requests} requests of {length} tokens"
            raise UserError(f"--max_concurrent_requests: {need}; lower it or --max_seq_length") from error
        names = checkpoint_dir, batcher, loaded.tokenizer, template
        service = Service(*names, sampling, max_new_tokens, max_active=batcher.n_rows + max_queue)
        address = f"[{host}]" if ":" in host else host
        app = make_app(service, api_key, {"127.0.0.1", "localhost", "[::1]", address})
        cache = batcher.cache_bytes / 2**20
        notice(
            f"http://{address}:{listener.getsockname()[1]}/v1 serves {checkpoint_dir} on {loaded.device}: "
            f"{batcher.n_rows} requests at once, {max_queue} waiting, {length} tokens each; KV cache {cache:.0f} MiB; "
            f"{'with' if api_key else 'no'} API key"
        )
        batcher.start()
        try:
            run_server(app, listener, shutdown_timeout, service.stop)
        finally:
            batcher.stop()


def load_template(tokenizer: Any, prompt_style: str | None, chat_template: str | None) -> Any:
    """Return the chat template; without one, the reason, if none was asked for: the model completes texts."""
    from toolkit.inference.chat import find_template

    try:
        return find_template(tokenizer, prompt_style, chat_template)
    except UserError as error:
        if prompt_style is not None or chat_template is not None:
            raise
        return error


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_name = re.fullmatch(r"[\w.-]*[a-z][\w.-]*", host, re.IGNORECASE) is not None
        require_option(is_name, "host", host, "is not an address or a name, such as --host localhost --port 8000")
        return False

"""`pyruntime serve`: OpenAI's completions over HTTP, for scoring, and a page to look at scores."""

from __future__ import annotations

import argparse
import gc
import math
import signal
import socket
import sys
import threading
import time
from pathlib import PurePath
from typing import TYPE_CHECKING

from pyruntime.commands.options import add_engine, add_json, add_model, loaded, print_json
from pyruntime.errors import ToolError, reason

if TYPE_CHECKING:
    from pyruntime.engine import Engine

BACKLOG = 2048  # connections that wait to be accepted
SWITCH = 5e-4  # seconds that a thread may go on where the one that has the engine wants to
KEEP_ALIVE = 60  # seconds for which a connection may be idle
SEND = 5  # seconds, after those for a request, until its answer is read or the server stops anyway
FOREVER = 1e9


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("pyruntime serve", description=__doc__)
    add_model(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free (default 8000)")
    parser.add_argument("--name", help="what requests call the model (default: MODEL's own name)")
    for option, default, text in (
        ("--max-queue", 256, "requests that are taken and not yet answered; more get status 429"),
        ("--max-prompts", 256, "prompts of a request"),
        ("--max-body", 16 << 20, "bytes of a request"),
        ("--cache-tokens", 32768, "positions of the caches of all prompts that are continued"),
    ):
        parser.add_argument(
            option, type=int, default=default, metavar="N", help=f"at most so many {text} "
            f"(default {default})",
        )  # fmt: skip
    parser.add_argument(
        "--max-prompt-tokens", type=int, metavar="N",
        help="of a prompt and its completion together (default: the model's context length)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="SECONDS",
        help="until a request is answered, or else given up (default 600)",
    )  # fmt: skip
    add_engine(parser)
    add_json(parser)
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; 0: it was told to stop, and has answered what it had taken."""
    args = _parser().parse_args(argv)
    for option in ("max_queue", "max_prompts", "max_body", "cache_tokens", "timeout"):
        _check(option, getattr(args, option))
    if args.max_prompt_tokens is not None:
        _check("max_prompt_tokens", args.max_prompt_tokens)
    if not 0 <= args.port < 1 << 16:
        raise ValueError(f"--port {args.port}: it must be from 0 to 65535")
    _require_packages()
    # Its port is taken first: that it is in use shows at once, and who comes early waits.
    with listening(args.host, args.port) as listener, loaded(args) as engine:
        _serve(args, engine, listener)
    return 0


def _check(option: str, value: float) -> None:
    if not value > 0:  # nor is nan
        raise ValueError(f"--{option.replace('_', '-')} {value}: it must be more than 0")


def _require_packages() -> None:
    try:
        import fastapi  # noqa: F401  (an extra: is it there?)
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ToolError(f"{error}: pip install 'pyruntime-cuda[serve]'") from None


def listening(host: str, port: int) -> socket.socket:
    """A socket that connections may wait at. Raises OSError, naming the address."""
    try:
        # With proto, or else asyncio leaves Nagle's algorithm on, which costs 40 ms an answer.
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        hint = "; --port 0 takes one that is free" if port else ""
        raise OSError(f"{host}, port {port}: {reason(error)}{hint}") from None


def _serve(args: argparse.Namespace, engine: Engine, listener: socket.socket) -> None:
    import uvicorn

    from pyruntime.serve.app import create_app
    from pyruntime.serve.protocol import Limits
    from pyruntime.serve.texts import Texts
    from pyruntime.serve.worker import Worker

    context = engine.config.context_length
    limits = Limits(
        prompts=args.max_prompts,
        prompt_tokens=min(args.max_prompt_tokens or context, context),
        body_bytes=args.max_body,
        seconds=args.timeout,
    )
    sys.setswitchinterval(SWITCH)
    name = args.name or _name(args.model)
    texts = Texts(engine)
    threading.Thread(target=texts.fill, name="pyruntime-texts", daemon=True).start()
    worker = Worker(engine, max_queue=args.max_queue, cache_tokens=args.cache_tokens)
    app = create_app(worker, texts, name, int(time.time()), limits)
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(min(args.timeout, FOREVER)) + SEND,
    )  # fmt: skip
    server = uvicorn.Server(config)
    # It stops by itself at these signals, but then raises them again.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, server.handle_exit)
    gc.collect()
    gc.freeze()  # what there is now stays: no collection while a request waits needs to look at it
    try:
        _say_ready(args, engine, name, listener)
        server.run(sockets=[listener])
    finally:
        worker.close()


def _say_ready(
    args: argparse.Namespace, engine: Engine, name: str, listener: socket.socket
) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if args.json:
        print_json("serve", {"url": url, "model": name, "device": engine.path})
    else:
        print(f"{name} on {engine.path}: {url}")
    sys.stdout.flush()


def _name(model: str) -> str:
    """A path or hf: address by the name of its file, an alias as it is."""
    return PurePath(model).name.removesuffix(".gguf")

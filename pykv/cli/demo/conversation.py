"""Runs the demo's chats against a daemon, all at the same time."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pykv.cli.demo.chats import MAX_TOKENS, SYSTEM_PROMPT
from pykv.cli.demo.report import ChatResult
from pykv.cli.demo.view import View
from pykv.client import Client
from pykv.engine.outputs import OutputDelta, Usage
from pykv.sampling import SamplingParams

__all__ = ["run_chats"]


async def run_chats(client: Client, questions: Sequence[str], view: View) -> list[ChatResult]:
    """Asks all questions at once over one system prompt and streams the answers into the view."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_run_chat(client, question, view, chat))
            for chat, question in enumerate(questions)
        ]
    return [task.result() for task in tasks]


async def _run_chat(client: Client, question: str, view: View, chat: int) -> ChatResult:
    record = _Record(question, time.perf_counter())
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    async for delta in client.chat(messages, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)):
        record.add(delta, time.perf_counter())
        view.add(chat, delta.text)
    view.finish(chat)
    return record.result(time.perf_counter())


@dataclass
class _Record:
    """What one chat's client has seen so far; times are of one steady clock, in seconds."""

    question: str
    started: float
    first_token: float | None = None
    answer: str = ""
    finish_reason: str = ""
    usage: Usage | None = None

    def add(self, delta: OutputDelta, now: float) -> None:
        if delta.token_ids and self.first_token is None:
            self.first_token = now
        self.answer += delta.text
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.usage = delta.usage or self.usage

    def result(self, now: float) -> ChatResult:
        if self.usage is None or self.first_token is None:
            raise RuntimeError(
                f"the answer to {self.question!r} ended with {self.finish_reason!r} and without usage"
            )
        return ChatResult(
            question=self.question,
            answer=self.answer,
            finish_reason=self.finish_reason,
            prompt_tokens=self.usage.prompt_tokens,
            cached_tokens=self.usage.cached_tokens,
            output_tokens=self.usage.output_tokens,
            first_token_seconds=self.first_token - self.started,
            total_seconds=now - self.started,
        )
